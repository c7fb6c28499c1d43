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
    source: Files,
    tokenizer: Tokenizer,
    world_size: int = 1,
    num_workers: int = 0,
    steps: range = range(STEPS),
    start_tokens: int = 0,
    repeat: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of all ranks together, (steps, sequences, seq_len)."""
    plan = Budget(STEPS * SEQUENCES * SEQ_LEN, SEQUENCES, micro_batch=1).plan(SEQ_LEN, world_size)
    ranks = []
    for rank in range(world_size):
        loader = StreamLoader(source, tokenizer, SPLIT, plan, rank, lambda: steps, num_workers, start_tokens, repeat)
        assert len(loader) == STEPS
        ranks.append(list(loader))
        assert len(ranks[-1]) == len(steps)
        assert ranks[-1][0]["tokens"].shape == (SEQUENCES // world_size, 1, SEQ_LEN)
    return tuple(
        torch.stack([torch.cat([batch[name].flatten(0, 1) for batch in step]) for step in zip(*ranks, strict=True)])
        for name in ("tokens", "labels")
    )  # type: ignore[return-value]


def region(source: Files, tokenizer: Tokenizer) -> torch.Tensor:
    """The tokens of the training documents, once."""
    return torch.from_numpy(build_corpus(source, tokenizer, SPLIT)["train"].tokens[:].astype("int64"))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_is_the_training_region_without_loss(
    source: Files, tokenizer: Tokenizer, world_size: int, num_workers: int
) -> None:
    once = region(source, tokenizer)
    n = STEPS * SEQUENCES * SEQ_LEN
    assert len(once) < n < 3 * len(once)  # so that it comes round again within the run
    endless = torch.cat([once] * 4)
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


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (2, 2)])
def test_tokens_to_pass_over_are_cut_off_the_stream(
    source: Files, tokenizer: Tokenizer, world_size: int, num_workers: int
) -> None:
    n = SEQUENCES * SEQ_LEN
    whole = streamed(source, tokenizer)[0].flatten()
    for start in (1, n + 17, len(region(source, tokenizer)), len(region(source, tokenizer)) + 5):
        tokens, labels = streamed(source, tokenizer, world_size, num_workers, range(2), start)
        assert torch.equal(tokens.flatten(), whole[start : start + 2 * n])
        assert torch.equal(labels.flatten(), whole[start + 1 : start + 2 * n + 1])


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (2, 2)])
@pytest.mark.parametrize("start_tokens", [0, 300])
def test_each_later_epoch_is_one_line(
    source: Files,
    tokenizer: Tokenizer,
    world_size: int,
    num_workers: int,
    start_tokens: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    streamed(source, tokenizer, world_size, num_workers, start_tokens=start_tokens)
    length, n = len(region(source, tokenizer)), SEQUENCES * SEQ_LEN
    first = (length - start_tokens) // n  # the step, from 0, that reads the first token of the second epoch
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"epoch 2 of the training data begins in step {first + 1}"
    assert len(lines) == (start_tokens + STEPS * n - 1) // length
    # a resume reads what came before once more, and says nothing of it
    streamed(source, tokenizer, world_size, num_workers, range(first + 1, first + 2), start_tokens)
    assert "epoch 2" not in capfd.readouterr().err


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_may_not_repeat_gives_all_its_steps_and_ends_in_one_line(
    source: Files, tokenizer: Tokenizer, num_workers: int
) -> None:
    plan = Budget(STEPS * SEQUENCES * SEQ_LEN, SEQUENCES, micro_batch=1).plan(SEQ_LEN, 1)
    loader = StreamLoader(source, tokenizer, SPLIT, plan, 0, lambda: range(STEPS), num_workers, 100, repeat=False)
    left = region(source, tokenizer)[100:]
    whole_steps = (len(left) - 1) // plan.tokens_per_step
    batches = iter(loader)
    given: list[torch.Tensor] = []
    with pytest.raises(UserError) as raised:
        given.extend(batch["tokens"].flatten() for batch in batches)
    assert torch.equal(torch.cat(given), left[: whole_steps * plan.tokens_per_step])
    assert str(raised.value) == (
        f"source {source.label} ends in step {whole_steps + 1} of {STEPS}, before data.budget.tokens"
        f" {STEPS * SEQUENCES * SEQ_LEN}; data.repeat: true begins a second epoch"
    )
