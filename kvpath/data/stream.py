"""Training batches from a source too large to keep: tokenised and packed while it is read."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from kvpath.data.budget import Plan
from kvpath.data.lane_reader import LaneReader, StreamSettings
from kvpath.data.lanes import Lane, Place, Sequence
from kvpath.data.loaders import Batch, as_batch, say_epoch
from kvpath.data.record import StreamRecord
from kvpath.data.workers import read_ahead
from kvpath.errors import UserError


class StreamLoader:
    """Whole optimizer steps of a stream; sequence g of the run comes from lane g mod lanes.

    Each worker of each rank reads the whole source, but tokenises the documents of its own lanes only (see
    `kvpath.data.lanes`). A resume goes on where the record says that the lanes stand, from the part of the source that
    they are in; without that it makes and drops what came before.

    Args:
        settings: what decides the stream.
        plan: how steps are made up.
        rank: this rank; it takes every so many sequences of a step.
        steps: the steps still to run, asked for at the start of each iteration.
        record: where they are counted.
        done: the optimizer steps that are done, asked for at the start of each iteration.
        num_workers: processes that read ahead, each serving some of the lanes.
        end_of_text: the token that ends a document, if documents are to stand alone in a batch.
        agree: gives every rank the first problem that one of them has; asked once a step.
    """

    def __init__(
        self,
        settings: StreamSettings,
        plan: Plan,
        rank: int,
        steps: Callable[[], range],
        record: StreamRecord,
        done: Callable[[], int],
        num_workers: int = 0,
        end_of_text: int | None = None,
        agree: Callable[[str | None], str | None] = lambda problem: problem,
    ) -> None:
        self._settings, self._plan, self._rank, self._steps = settings, plan, rank, steps
        self._record, self._done, self._num_workers = record, done, num_workers
        self._end_of_text, self._agree = end_of_text, agree

    def __len__(self) -> int:
        return self._plan.steps

    def __iter__(self) -> Iterator[Batch]:
        steps, done = self._steps(), self._done()
        places = self._record.places(done) if steps and steps[0] == done else None
        self._record.begin(done)
        dataset = _LaneDataset(self._settings, self._plan, self._rank, steps, places)
        parts = read_ahead(dataset, self._num_workers, prefetch=2)
        for step in range(done, done + len(steps)):
            tokens, labels, places = self._joined(parts)
            self._record.add(tokens, self._places(step), places)
            shape = (self._plan.accumulation, self._plan.micro_batch, self._plan.seq_len)
            yield as_batch(tokens.reshape(shape), labels.reshape(shape), self._end_of_text)

    def _places(self, step: int) -> NDArray[np.int64]:
        """Places in the global order of this rank's sequences of a step."""
        first = step * self._plan.sequences_per_step + self._rank
        return first + self._plan.world_size * np.arange(self._plan.sequences_per_rank)

    def _joined(self, parts: Iterator["_Part"]) -> tuple[NDArray[np.int64], NDArray[np.int64], Tensor]:
        """The workers' parts of a step as one: tokens and labels (N, T), and the places of this rank's lanes."""
        problem, found = None, []
        try:
            found = [next(parts) for _ in range(max(1, self._num_workers))]
        except UserError as error:
            problem = str(error)
        if agreed := self._agree(problem):
            raise UserError(agreed)
        own_lanes = self._settings.lanes // self._plan.world_size
        both = np.empty((2, self._plan.sequences_per_rank, self._plan.seq_len), dtype=np.int64)
        places = torch.empty(own_lanes, len(Place._fields), dtype=torch.int64)
        for worker, part in enumerate(found):
            both[:, part.first :: len(found)] = part.sequences_2NT.numpy()
            places[worker :: len(found)] = torch.tensor(part.places)
        return both[0], both[1], places

    # Lightning warns of a loader without these two when a run resumes.
    def state_dict(self) -> dict[str, int]:
        """Nothing: the record is kept by the data module, for all ranks."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Nothing."""


class _Part(NamedTuple):
    """What one worker gives for a step. One tensor alone: each takes a connection from process to process."""

    first: int
    """Its sequences are every so many of this rank, from this one on."""

    sequences_2NT: Tensor
    """Tokens and labels, int64."""

    places: list[Place]
    """Of its lanes, after the step."""


class _LaneDataset(IterableDataset[_Part | UserError]):
    """One part a step.

    Args:
        settings: what decides the stream.
        plan: how steps are made up.
        rank: this rank.
        steps: the steps to make.
        places_L5: where this rank's lanes stand before the first of them; None makes all steps before it, too.
    """

    def __init__(self, settings: StreamSettings, plan: Plan, rank: int, steps: range, places_L5: Tensor | None) -> None:
        self._settings, self._plan, self._rank = settings, plan, rank
        self._steps, self._places = steps, places_L5

    def __iter__(self) -> Iterator[_Part | UserError]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        ranks, n = self._plan.world_size, self._plan.sequences_per_rank
        lanes = {
            lane * ranks + self._rank: self._settings.lane(self._place(lane))
            for lane in range(number, self._settings.lanes // ranks, workers)
        }
        reader = LaneReader(self._settings, lanes)
        start = self._steps[0] if self._places is not None else 0
        epoch = lanes[0].epoch if 0 in lanes else None
        try:
            for step in range(start, self._steps[-1] + 1):
                # sequence q of this rank is sequence q x ranks + rank of the run
                first = (number - step * n) % workers
                own = [((step * n + i) * ranks + self._rank) % self._settings.lanes for i in range(first, n, workers)]
                sequences = [self._next(reader, lane, step) for lane in own]
                if epoch is not None and lanes[0].epoch > epoch:
                    epoch = lanes[0].epoch
                    if step in self._steps:
                        say_epoch(epoch, step)
                if step in self._steps:
                    yield self._part(first, sequences, lanes)
        except UserError as error:
            yield error

    def _place(self, lane: int) -> Place | None:
        return None if self._places is None else Place(*self._places[lane].tolist())

    def _next(self, reader: LaneReader, lane: int, step: int) -> Sequence:
        sequence = reader.next(lane)
        if sequence is None:
            raise UserError(
                f"source {self._settings.source.label} ends in step {step + 1} of {self._plan.steps},"
                f" before data.budget.tokens {self._plan.tokens}; data.repeat: true begins a second epoch"
            )
        return sequence

    def _part(self, first: int, sequences: list[Sequence], lanes: dict[int, Lane]) -> _Part:
        stacked = np.empty((2, len(sequences), self._plan.seq_len), dtype=np.int64)
        for i, (tokens, labels) in enumerate(sequences):
            stacked[0, i], stacked[1, i] = tokens, labels
        return _Part(first, torch.from_numpy(stacked), [lane.place for lane in lanes.values()])
