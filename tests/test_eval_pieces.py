"""eval/paper is the protocol of the paper, on the very documents that the data pieces keep from training."""

from typing import Any

import pytest

from kvpath import pieces
from kvpath.cli.resume import refuse_trained_texts
from kvpath.data.evaluations import EvaluatedText
from kvpath.data.sources import Hub
from kvpath.errors import UserError

CORPORA = ["c4", "fineweb_edu", "wikipedia", "pg19"]


def data_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = pieces.compose([pieces.shipped(name)])["data"]
    return found


def test_corpora_contexts_and_tokens() -> None:
    paper = data_of("eval/paper")
    assert list(paper["evaluate"]) == CORPORA
    assert paper["eval_contexts"] == [2048, 8192, 32768]
    assert {text["limit_tokens"] for text in paper["evaluate"].values()} == {10_000_000}
    assert all(paper["eval_batch_tokens"] % context == 0 for context in paper["eval_contexts"])


@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_is_that_of_its_data_piece_and_never_trained_on(name: str) -> None:
    text, trained = data_of("eval/paper")["evaluate"][name], data_of(f"data/{name}")
    ours, theirs = (part["source"]["init_args"] for part in (text, trained))
    assert {**ours, "split": None} == {**theirs, "split": None}
    made = {name: EvaluatedText(Hub(**ours), **{key: value for key, value in text.items() if key != "source"})}
    if ours["split"] == theirs["split"]:
        assert text["holdout_every"] == trained["holdout_every"] is not None
        with pytest.raises(UserError, match=f"evaluate.{name}: holdout_every was 7"):
            refuse_trained_texts({**trained, "holdout_every": 7}, {name: text}, made)
    else:
        assert text["holdout_every"] is None
    refuse_trained_texts(trained, {name: text}, made)
