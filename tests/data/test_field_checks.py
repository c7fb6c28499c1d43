"""Fields that make no sense, or none together."""

import pytest

from kvpath.data.budget import Budget
from kvpath.data.tokenizer import TokenizerConfig
from kvpath.errors import UserError
from tests.data.modules import Make


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"holdout_every": 2}, ["holdout_every must be at least 3, got 2"]),
        (
            {"seq_len": 0, "eval_contexts": [4, 0], "num_workers": -1},
            ["seq_len must be at least 1, got 0", "num_workers must be at least 0, got -1", r"eval_contexts\[1\] must"],
        ),
        ({"eval_contexts": []}, ["eval_contexts must name at least one"]),
        (
            {"stream": True, "budget": Budget(None, 4), "tokenizer": TokenizerConfig("train", 300)},
            ["budget.tokens must be stated", "tokenizer.name must name a finished", "eval_limit_tokens must be stated"],
        ),
    ],
)
def test_bad_arguments_come_together(make: Make, changes: dict[str, object], messages: list[str]) -> None:
    with pytest.raises(UserError, match=".*; .*".join(messages)):
        make(**changes)


@pytest.mark.parametrize("block", [0, 4, 12])
def test_a_block_holds_whole_windows(make: Make, block: int) -> None:
    with pytest.raises(UserError, match=f"shuffle_block must be a multiple of seq_len 8, got {block}"):
        make(shuffle_block=block)
