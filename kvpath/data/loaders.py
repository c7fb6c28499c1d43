"""Batches of a tokenised corpus: which windows go into which batch of which rank, and the loader that fetches them."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from kvpath.data.budget import Plan
from kvpath.data.order import BlockOrder
from kvpath.data.packing import Packing, part_documents
from kvpath.data.record import StreamRecord
from kvpath.data.workers import read_ahead

Batch = dict[str, Tensor]
"""``tokens`` and ``labels``, int64, of the same shape; where documents stand alone, also ``documents`` and
``positions`` (see `kvpath.data.packing.part_documents`)."""


_PLACES_AT_A_TIME = 8192
"""A place in the order costs as much to compute as some hundred places together."""


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
        steps = self.steps()
        at_a_time = max(1, _PLACES_AT_A_TIME // self.plan.sequences_per_rank)
        for first in range(0, len(steps), at_a_time):
            some = steps[first : first + at_a_time]
            for step, windows in zip(some, self.windows_of(some), strict=True):
                self._say_if_an_epoch_begins(step)
                yield windows

    def windows_of(self, steps: range) -> NDArray[np.int64]:
        """Windows of some steps for this rank, (steps, accumulation, micro_batch)."""
        places = np.stack([self.places(step) for step in steps])
        return self.order.index(places).reshape(len(steps), self.plan.accumulation, self.plan.micro_batch)

    def places(self, step: int) -> NDArray[np.int64]:
        """Places in the order of this rank's share of ``step``, (sequences_per_rank,)."""
        first = step * self.plan.sequences_per_step + self.rank * self.plan.sequences_per_rank
        return np.arange(first, first + self.plan.sequences_per_rank, dtype=np.int64)

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
        windows: the sequences, by number.
        schedule: which of them make a batch.
        num_workers: processes that read ahead; 0 reads in this one.
        end_of_text: the token that ends a document, if documents are to stand alone in a batch.
    """

    def __init__(
        self, windows: Packing, schedule: Schedule, num_workers: int = 0, end_of_text: int | None = None
    ) -> None:
        self._windows, self._schedule, self._num_workers = windows, schedule, num_workers
        self._end_of_text = end_of_text

    def __len__(self) -> int:
        return len(self._schedule)

    def __iter__(self) -> Iterator[Batch]:
        return read_ahead(_WindowDataset(self._windows, self._end_of_text), self._num_workers, self._schedule)

    # Lightning warns of a loader without these two when a run resumes.
    def state_dict(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Nothing."""


class RecordingLoader(StepLoader):
    """A training loader that counts what it gives.

    Args:
        windows: the sequences, by number.
        schedule: which of them make a step.
        record: where they are counted.
        done: the optimizer steps that are done, asked for at the start of each iteration.
        num_workers: processes that read ahead; 0 reads in this one.
        end_of_text: the token that ends a document, if documents are to stand alone in a batch.
    """

    def __init__(
        self,
        windows: Packing,
        schedule: TrainingSchedule,
        record: StreamRecord,
        done: Callable[[], int],
        num_workers: int = 0,
        end_of_text: int | None = None,
    ) -> None:
        super().__init__(windows, schedule, num_workers, end_of_text)
        self._places, self._record, self._done = schedule.places, record, done

    def __iter__(self) -> Iterator[Batch]:
        done = self._done()
        self._record.begin(done)
        for step, batch in enumerate(super().__iter__(), done):
            self._record.add(batch["tokens"].flatten(0, 1).numpy(), self._places(step))
            yield batch


def say_epoch(epoch: int, step: int) -> None:
    """Say that training data comes round again: the epoch and the first step that reads it, both from 0."""
    print(f"epoch {epoch + 1} of the training data begins in step {step + 1}", file=sys.stderr, flush=True)


class _WindowDataset(Dataset[Batch]):
    """Windows by array of numbers: the batch has the array's shape, and then the context."""

    def __init__(self, windows: Packing, end_of_text: int | None) -> None:
        self._windows, self._end_of_text = windows, end_of_text

    def __getitem__(self, numbers: NDArray[np.int64]) -> Batch:
        tokens_NC, labels_NC = self._windows.batch(numbers.ravel().tolist())
        shape = (*numbers.shape, self._windows.context)
        return as_batch(tokens_NC.reshape(shape), labels_NC.reshape(shape), self._end_of_text)


def as_batch(tokens: NDArray[np.int64], labels: NDArray[np.int64], end_of_text: int | None) -> Batch:
    """A batch of sequences; with an end-of-text token, one in which each document stands alone."""
    arrays = {"tokens": tokens, "labels": labels}
    if end_of_text is not None:
        arrays = part_documents(tokens, labels, end_of_text)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
