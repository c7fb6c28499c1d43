"""A stream is the kept corpus in its own order, for any number of ranks and workers and from any step on."""

from dataclasses import replace

import pytest
import torch

from kvpath.data.budget import Budget
from kvpath.data.corpus import Split, build_corpus
from kvpath.data.sources import Files
from kvpath.data.stream import StreamLoader
from kvpath.data.tokenizer import Tokenizer
from kvpath.errors import UserError

SEQ_LEN, SEQUENCES, STEPS = 40, 6, 9
SPLIT = Split(5)


def streamed(
    source: Files, tokenizer: Tokenizer, world_size: int = 1, num_workers: int = 0, steps: range = range(STEPS)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of all ranks together, (steps, sequences, seq_len)."""
    plan = Budget(STEPS * SEQUENCES * SEQ_LEN, SEQUENCES, micro_batch=1).plan(SEQ_LEN, world_size)
    ranks = []
    for rank in range(world_size):
        loader = StreamLoader(source, tokenizer, SPLIT, plan, rank, lambda: steps, num_workers)
        assert len(loader) == STEPS
        ranks.append(list(loader))
        assert len(ranks[-1]) == len(steps)
        assert ranks[-1][0]["tokens"].shape == (SEQUENCES // world_size, 1, SEQ_LEN)
    return tuple(
        torch.stack([torch.cat([batch[name].flatten(0, 1) for batch in step]) for step in zip(*ranks, strict=True)])
        for name in ("tokens", "labels")
    )  # type: ignore[return-value]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_is_the_training_region_without_loss(
    source: Files, tokenizer: Tokenizer, world_size: int, num_workers: int
) -> None:
    region = torch.from_numpy(build_corpus(source, tokenizer, SPLIT)["train"].tokens[:].astype("int64"))
    n = STEPS * SEQUENCES * SEQ_LEN
    assert len(region) < n < 3 * len(region)  # so that it comes round again within the run
    endless = torch.cat([region] * 4)
    tokens, labels = streamed(source, tokenizer, world_size, num_workers)
    assert torch.equal(tokens.flatten(), endless[:n])
    assert torch.equal(labels.flatten(), endless[1 : n + 1])


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (2, 2)])
def test_going_on_is_exact(source: Files, tokenizer: Tokenizer, world_size: int, num_workers: int) -> None:
    whole, _ = streamed(source, tokenizer)
    rest, _ = streamed(source, tokenizer, world_size, num_workers, steps=range(4, STEPS))
    assert torch.equal(rest, whole[4:])


def test_a_stream_without_training_documents_ends_in_a_message(source: Files, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="no document is left to train on"):
        streamed(replace(source, max_documents=1), tokenizer)
