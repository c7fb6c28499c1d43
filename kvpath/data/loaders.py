"""Batches of a tokenised corpus: which windows go into which batch of which rank, and the loader that fetches them."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kvpath.data.budget import Plan
from kvpath.data.order import BlockOrder
from kvpath.data.packing import Windows
from kvpath.errors import UserError

Batch = dict[str, Tensor]
"""``tokens`` and ``labels``, int64, of the same shape."""


class Schedule(Protocol):
    """The batches of one rank, each an array of window numbers."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[NDArray[np.int64]]: ...


@dataclass(frozen=True)
class TrainingSchedule:
    """One batch per optimizer step: (accumulation, micro_batch) windows.

    Step s takes positions [s x N, (s + 1) x N) of the order, N = sequences_per_step, and each rank an equal, contiguous
    share of those. So neither the ranks nor the micro-batch change what a step sees.

    Args:
        plan: how steps are made up.
        order: which window is at which position.
        rank: this rank.
        steps: the steps still to run, asked for at the start of each iteration.
    """

    plan: Plan
    order: BlockOrder
    rank: int
    steps: Callable[[], range]

    def __len__(self) -> int:
        return self.plan.steps

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        for step in self.steps():
            self._say_if_an_epoch_begins(step)
            yield self.windows_of(step)

    def windows_of(self, step: int) -> NDArray[np.int64]:
        """Windows of ``step`` for this rank, (accumulation, micro_batch)."""
        plan = self.plan
        first = step * plan.sequences_per_step + self.rank * plan.sequences_per_rank
        positions = np.arange(first, first + plan.sequences_per_rank, dtype=np.int64)
        return self.order.index(positions).reshape(plan.accumulation, plan.micro_batch)

    def _say_if_an_epoch_begins(self, step: int) -> None:
        first = step * self.plan.sequences_per_step
        before, last = max(0, self.order.epoch(first - 1)), self.order.epoch(first + self.plan.sequences_per_step - 1)
        if self.rank == 0 and before != last:
            say_epoch(last, step)


@dataclass(frozen=True)
class EvaluationSchedule:
    """Every window once, in order, (per_batch,) at a time, dealt to the ranks in turn.

    All ranks get the same number of batches: what is missing is filled with window -1, which is all padding.

    Args:
        n_windows: windows of the region.
        per_batch: windows in a batch.
        rank: this rank.
        world_size: number of ranks.
    """

    n_windows: int
    per_batch: int
    rank: int
    world_size: int

    def __len__(self) -> int:
        return -(-self.n_windows // (self.per_batch * self.world_size))

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        for turn in range(len(self)):
            first = (turn * self.world_size + self.rank) * self.per_batch
            windows = np.arange(first, first + self.per_batch, dtype=np.int64)
            yield np.where(windows < self.n_windows, windows, -1)


class StepLoader:
    """An iterable of batches that Lightning leaves as it is: it knows its rank and, in training, where to go on.

    It has no state to save: the step at which training goes on says everything.

    Args:
        windows: the run of tokens, cut up.
        schedule: which windows make a batch.
        num_workers: processes that read ahead; 0 reads in this one.
    """

    def __init__(self, windows: Windows, schedule: Schedule, num_workers: int = 0) -> None:
        self._windows, self._schedule, self._num_workers = windows, schedule, num_workers

    def __len__(self) -> int:
        return len(self._schedule)

    def __iter__(self) -> Iterator[Batch]:
        return iter_batches(_WindowDataset(self._windows), self._num_workers, self._schedule)

    # Lightning warns of a loader without these two when a run resumes.
    def state_dict(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Nothing."""


def say_epoch(epoch: int, step: int) -> None:
    """Say that training data comes round again: the epoch and the first step that reads it, both from 0."""
    print(f"epoch {epoch + 1} of the training data begins in step {step + 1}", file=sys.stderr, flush=True)


def iter_batches(
    dataset: Dataset[Batch | UserError], num_workers: int, schedule: Schedule | None = None
) -> Iterator[Batch]:
    """Batches as the dataset makes them, whole, read ahead by workers.

    Raises:
        UserError: one that the dataset gives instead of a batch. Raised in a worker, it would come with a traceback.
    """
    for batch in DataLoader(
        dataset,
        batch_size=None,
        sampler=schedule,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        # of its own: otherwise each iteration would draw from the global random state
        generator=torch.Generator(),
    ):
        if isinstance(batch, UserError):
            raise batch
        yield batch


class _WindowDataset(Dataset[Batch | UserError]):
    """Windows by array of numbers: the batch has the array's shape, and then the context."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows

    def __getitem__(self, numbers: NDArray[np.int64]) -> Batch:
        pairs = [self._windows.window(int(i)) for i in numbers.ravel()]
        shape = (*numbers.shape, self._windows.context)
        tokens, labels = (np.stack(arrays).reshape(shape) for arrays in zip(*pairs, strict=True))
        return {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
