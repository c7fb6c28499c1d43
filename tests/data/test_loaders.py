"""Ranks, workers and micro-batches only deal out what the order says: the union is always the same."""

import numpy as np
import pytest
import torch

from kvpath.data.budget import Budget
from kvpath.data.loaders import Batch, EvaluationSchedule, StepLoader, TrainingSchedule
from kvpath.data.order import BlockOrder
from kvpath.data.packing import IGNORE, Windows

SEQ_LEN = 4
WINDOWS = Windows(np.arange(1000, 1000 + 31 * SEQ_LEN + 1), SEQ_LEN)


def training_steps(
    world_size: int, micro_batch: int = 1, num_workers: int = 0, first: int = 0, seed: int = 5
) -> list[torch.Tensor]:
    """Tokens of each global step, (sequences_per_step, seq_len), put together from the batches of all ranks."""
    plan = Budget(12 * SEQ_LEN * 7, global_batch_sequences=12, micro_batch=micro_batch).plan(SEQ_LEN, world_size)
    assert plan.steps == 7
    batches: list[list[Batch]] = []
    for rank in range(world_size):
        order = BlockOrder(WINDOWS.n_windows, 1, seed)
        schedule = TrainingSchedule(plan, order, rank, steps=lambda: range(first, plan.steps))
        loader = StepLoader(WINDOWS, schedule, num_workers)
        assert len(loader) == 7
        batches.append(list(loader))
    for batch in batches[0]:
        assert batch["tokens"].shape == batch["labels"].shape == (plan.accumulation, micro_batch, SEQ_LEN)
        assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64
        assert torch.equal(batch["tokens"] + 1, batch["labels"])
    return [torch.cat([batch["tokens"].flatten(0, 1) for batch in step]) for step in zip(*batches, strict=True)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 1), (1, 4), (2, 3), (3, 2)])
def test_the_stream_does_not_depend_on_the_machine(world_size: int, micro_batch: int, num_workers: int) -> None:
    stream = torch.stack(training_steps(world_size, micro_batch, num_workers))
    windows = BlockOrder(WINDOWS.n_windows, 1, seed=5).index(np.arange(7 * 12))
    expected = np.stack([WINDOWS.window(int(i))[0] for i in windows]).reshape(7, 12, SEQ_LEN)
    assert torch.equal(stream, torch.from_numpy(expected))


def test_an_epoch_holds_every_window_once() -> None:
    stream = torch.cat(training_steps(world_size=1))
    n = WINDOWS.n_windows
    for epoch in (stream[:n], stream[n : 2 * n]):
        assert sorted(epoch.flatten().tolist()) == list(range(1000, 1000 + n * SEQ_LEN))
    assert not torch.equal(stream[:n], stream[n : 2 * n])


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (2, 2)])
def test_going_on_is_the_rest_of_the_same_stream(world_size: int, num_workers: int) -> None:
    whole = training_steps(world_size=1)
    rest = training_steps(world_size, num_workers=num_workers, first=3)
    assert torch.equal(torch.stack(rest), torch.stack(whole[3:]))
    assert training_steps(world_size, first=7) == []


# 31 windows, 12 in a step: the second epoch begins in the third step, the third in the sixth.
SECOND, THIRD = (f"epoch {n} of the training data begins in step {step}" for n, step in ((2, 3), (3, 6)))


@pytest.mark.parametrize(
    ("world_size", "num_workers", "first", "said"),
    [(1, 0, 0, [SECOND, THIRD]), (2, 2, 0, [SECOND, THIRD]), (1, 0, 3, [THIRD])],
)
def test_each_later_epoch_is_one_line(
    world_size: int, num_workers: int, first: int, said: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    training_steps(world_size, num_workers=num_workers, first=first)
    assert capfd.readouterr().err.splitlines() == said


@pytest.mark.parametrize(
    ("n_windows", "start", "said"),
    [
        (24, 0, [(2, 3)]),  # an epoch ends with a step
        (36, 0, []),  # with the last one
        (36, 24, [(2, 2)]),
        (24, 24, [(2, 1), (3, 3)]),  # where the stage before ended
    ],
)
def test_epochs_that_end_with_a_step(
    n_windows: int, start: int, said: list[tuple[int, int]], capfd: pytest.CaptureFixture[str]
) -> None:
    plan = Budget(12 * SEQ_LEN * 3, global_batch_sequences=12).plan(SEQ_LEN, world_size=1)
    list(TrainingSchedule(plan, BlockOrder(n_windows, 1, 5, start), rank=0, steps=lambda: range(plan.steps)))
    lines = [f"epoch {epoch} of the training data begins in step {step}" for epoch, step in said]
    assert capfd.readouterr().err.splitlines() == lines


def test_another_seed_is_another_stream() -> None:
    assert not torch.equal(training_steps(1)[0], training_steps(1, seed=6)[0])


def test_iterating_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    training_steps(1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("context", [3, 8, 100])
def test_every_token_is_scored_on_exactly_one_rank(world_size: int, context: int, num_workers: int) -> None:
    region = np.arange(500, 500 + 101)
    windows = Windows(region, context, short_last=True)
    loaders = [
        StepLoader(windows, EvaluationSchedule(windows.n_windows, 4, rank, world_size), num_workers)
        for rank in range(world_size)
    ]
    batches = [list(loader) for loader in loaders]
    # a rank with fewer batches would let the others wait for ever
    assert {len(of_rank) for of_rank in batches} == {len(loaders[0])}
    assert all(batch["tokens"].shape == (4, context) for of_rank in batches for batch in of_rank)
    labels = torch.cat([batch["labels"].flatten() for of_rank in batches for batch in of_rank])
    assert sorted(labels[labels != IGNORE].tolist()) == region[1:].tolist()


def test_batches_are_dealt_in_turn() -> None:
    dealt = [list(EvaluationSchedule(5, per_batch=2, rank=rank, world_size=2)) for rank in range(2)]
    assert [batch.tolist() for batch in dealt[0]] == [[0, 1], [4, -1]]
    assert [batch.tolist() for batch in dealt[1]] == [[2, 3], [-1, -1]]
