"""Lanes of a stream: documents are dealt to them in turn, each packs its own, and sequences are taken in turn.

Document i belongs to lane i mod L, sequence g of the run comes from lane g mod L, and of W readers (ranks x workers)
number r serves the lanes l with l mod W = r. So any number of readers that divides L gives the same sequences.

The number of a document is known only to who has read all before it. So each reader reads the whole source, and
tokenises one W-th of it. To deal whole parts (files) to lanes would read each once, but a lane of small parts would
come to its end early and begin again: its documents would be trained on more often than others, and for a single file
there would be a single lane. Reading is far faster than tokenising; where W is so large, or the network so
slow, that it does hold up training, `kvpath prepare` is for that. A resume begins with the part that its lanes are in.
"""

from abc import ABC, abstractmethod
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpath.data.best_fit import Rows, pack_documents, read_row
from kvpath.errors import UserError

Sequence = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Tokens and labels, (seq_len,) each."""


class Place(NamedTuple):
    """Where a lane goes on: all that must be kept to resume it."""

    epoch: int = 0

    document: int = 0
    """Its number in the source; one that is not the lane's stands for the next that is."""

    done: int = 0
    """What of the lane's packing from there on was taken: tokens, or rows."""

    part: int = 0
    """The part of the source from which on to read, so that those before it need not be."""

    first: int = 0
    """The number of the first document of that part."""


class Document(NamedTuple):
    """The tokens of one document, its end-of-text token included, and where it lies."""

    epoch: int
    number: int
    ids: NDArray[np.int32]
    part: int = 0
    first: int = 0

    @property
    def place(self) -> Place:
        """Where a lane goes on that begins with it."""
        return Place(self.epoch, self.number, 0, self.part, self.first)

    @property
    def place_after(self) -> Place:
        """Where a lane goes on that is done with it."""
        return self.place._replace(document=self.number + 1)


class Lane(ABC):
    """Packs the documents that it is given.

    Args:
        seq_len: tokens in a sequence.
        place: where to go on.
    """

    def __init__(self, seq_len: int, place: Place) -> None:
        self.seq_len, self.place = seq_len, place
        self.epoch = place.epoch
        """That of the last token taken."""

    def wants(self, epoch: int, number: int) -> bool:
        """Whether a document is still to be read."""
        return (epoch, number) >= self.place[:2]

    @abstractmethod
    def add(self, document: Document) -> None:
        """Take the next document."""

    @abstractmethod
    def next(self, ended: bool) -> Sequence | None:
        """The next sequence; None if that needs another document.

        Args:
            ended: no other will come.
        """


class ContiguousLane(Lane):
    """Documents joined and cut into windows, none lost. ``done`` of its place counts tokens of the document.

    Args:
        seq_len: tokens in a sequence.
        place: where to go on.
        pass_over: tokens from there that are left out.
    """

    def __init__(self, seq_len: int, place: Place, pass_over: int = 0) -> None:
        super().__init__(seq_len, place)
        self._pass_over = pass_over
        self._waiting: deque[Document] = deque()
        self._n_waiting = -place.done

    def add(self, document: Document) -> None:
        """Take the next document."""
        if not self._waiting and document.place[:2] != self.place[:2]:
            self.place = document.place
        self._waiting.append(document)
        self._n_waiting += len(document.ids)
        if self._pass_over:
            n = min(self._pass_over, self._n_waiting)
            self._pass_over -= n
            self._advance(n)

    def next(self, ended: bool) -> Sequence | None:
        """The next window."""
        if self._n_waiting <= self.seq_len:
            return None
        parts, n, skip = [], 0, self.place.done
        for document in self._waiting:
            parts.append(document.ids[skip : skip + self.seq_len + 1 - n])
            n += len(parts[-1])
            skip = 0
            if n > self.seq_len:
                break
        read = np.concatenate(parts).astype(np.int64)
        self._advance(self.seq_len)
        return read[:-1], read[1:]

    def _advance(self, n: int) -> None:
        self._n_waiting -= n
        place, done = self.place, self.place.done + n
        while self._waiting and done >= len(self._waiting[0].ids):
            passed = self._waiting.popleft()
            self.epoch = passed.epoch
            done -= len(passed.ids)
            place = self._waiting[0].place if self._waiting else passed.place_after
        if done:
            self.epoch = place.epoch
        self.place = place._replace(done=done)


class BestFitLane(Lane):
    """Documents packed by best fit, ``group`` at a time. ``done`` of its place counts rows of the group.

    Args:
        seq_len: tokens in a sequence.
        place: where to go on: the first document of a group.
        group: documents that are packed together.
        end_of_text: the token that ends a document.
        pass_over: rows from there that are left out.
    """

    def __init__(self, seq_len: int, place: Place, group: int, end_of_text: int, pass_over: int = 0) -> None:
        super().__init__(seq_len, place)
        self._group, self._end_of_text = group, end_of_text
        self._pass_over = place.done + pass_over
        self._waiting: deque[Document] = deque()
        self._rows: Rows | None = None
        self._tokens = np.empty(0, dtype=np.int32)
        self._after = place

    def add(self, document: Document) -> None:
        """Take the next document."""
        self._waiting.append(document)

    def next(self, ended: bool) -> Sequence | None:
        """The next row."""
        while self._rows is None:
            if not self._waiting or (len(self._waiting) < self._group and not ended):
                return None
            self._open()
        row = self.place.done
        pieces = slice(*self._rows.ends[row : row + 2].tolist())
        sequence = read_row(
            self._tokens, self._rows.starts[pieces], self._rows.lengths[pieces], self.seq_len, self._end_of_text
        )
        self._go_to(row + 1)
        return sequence

    def _open(self) -> None:
        """Pack the next group, and go to its first row that is wanted."""
        documents = [self._waiting.popleft() for _ in range(min(self._group, len(self._waiting)))]
        self._tokens = np.concatenate([document.ids for document in documents])
        bounds = np.cumsum([0, *(len(document.ids) for document in documents)], dtype=np.int64)
        self._rows = pack_documents(bounds, self.seq_len)
        self.place, self._after = documents[0].place, documents[-1].place_after
        self.epoch = documents[-1].epoch
        done = min(self._pass_over, len(self._rows.ends) - 1)
        self._pass_over -= done
        self._go_to(done)

    def _go_to(self, row: int) -> None:
        assert self._rows is not None
        self.place = self.place._replace(done=row)
        if row == len(self._rows.ends) - 1:
            self.place, self._rows = self._after, None


def check_lanes(lanes: int, ranks: int, workers: int) -> None:
    """Refuse what does not divide the lanes.

    Raises:
        UserError: naming the numbers, and the nearest that would do.
    """
    readers = ranks * max(1, workers)
    if lanes % readers == 0:
        return
    divisors = [n for n in range(1, lanes + 1) if lanes % n == 0]
    near = [*[n for n in divisors if n < readers][-1:], *[n for n in divisors if n > readers][:1]]
    other = [n for n in (lanes // readers * readers, -(-lanes // readers) * readers) if n]
    raise UserError(
        f"data.lanes {lanes} cannot be dealt to {ranks} ranks x {max(1, workers)} workers = {readers}, which does not"
        f" divide it; nearest that do: ranks x data.num_workers of {' or '.join(map(str, near))};"
        f" or another stream, with data.lanes {' or '.join(map(str, other))}"
    )
