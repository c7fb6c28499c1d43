"""The documents of a stream, read once for several lanes."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvpath.data.corpus import in_batches
from kvpath.data.lanes import BestFitLane, ContiguousLane, Document, Lane, Place, Sequence
from kvpath.data.regions import Split
from kvpath.data.sources import Source
from kvpath.data.tokenizer import Tokenizer
from kvpath.errors import UserError

BATCH_CHARACTERS = 2**16
"""Tokenised at once. A step waits for all readers: one that has much to tokenise at once holds up the others, which
cannot read far ahead."""


@dataclass(frozen=True)
class StreamSettings:
    """What decides the stream.

    Args:
        source: where the documents come from.
        tokenizer: makes tokens of them.
        split: its ``rest`` is what is trained on.
        seq_len: tokens in a sequence.
        lanes: documents are dealt to so many lanes.
        group: documents that a lane packs together by best fit; None joins and cuts them.
        start_tokens: tokens at the front that are passed over, an equal share by each lane.
        repeat: begin again when the documents end; otherwise that is an error.
    """

    source: Source
    tokenizer: Tokenizer
    split: Split
    seq_len: int
    lanes: int
    group: int | None = None
    start_tokens: int = 0
    repeat: bool = True

    def lane(self, place: Place | None) -> Lane:
        """A lane that goes on at a place, or begins."""
        share = 0 if place else -(-self.start_tokens // self.lanes)
        place = place or Place()
        if self.group is None:
            return ContiguousLane(self.seq_len, place, share)
        rows = -(-share // self.seq_len)
        return BestFitLane(self.seq_len, place, self.group, self.tokenizer.end_of_text, rows)

    def documents(self, first_part: int = 0, say: bool = False) -> Iterator[tuple[int, str]]:
        """The training documents of one pass: see `Split.by_part`."""
        return self.split.by_part(self.source, "train", first_part, say)

    def check(self) -> None:
        """Refuse a source that leaves a lane empty; reads no more than its first documents.

        Raises:
            UserError: naming both numbers.
        """
        found = sum(1 for _ in itertools.islice(self.documents(), self.lanes))
        if not found:
            raise UserError(f"source {self.source.label}: no document is left to train on")
        if found < self.lanes:
            raise UserError(
                f"source {self.source.label}: {found} training documents are fewer than data.lanes {self.lanes};"
                f" data.lanes must be {found} at most"
            )


class LaneReader:
    """Reads the source from the part that its lanes are in, tokenises what they want, and passes over the rest as text.

    A lane that is ahead waits with its documents until the others have had theirs.

    Args:
        settings: what decides the stream.
        lanes: those to serve, by number.
    """

    def __init__(self, settings: StreamSettings, lanes: Mapping[int, Lane]) -> None:
        self._settings, self._lanes = settings, lanes
        self._batches = self._read()
        self._ended = False

    def next(self, lane: int) -> Sequence | None:
        """The next sequence of a lane; None if the documents end before it."""
        while (sequence := self._lanes[lane].next(self._ended)) is None and not self._ended:
            batch = next(self._batches, None)
            self._ended = batch is None
            for number, document in batch or ():
                self._lanes[number].add(document)
        return sequence

    def _read(self) -> Iterator[list[tuple[int, Document]]]:
        """The documents of these lanes, tokenised, each with the number of its lane."""
        places = [lane.place for lane in self._lanes.values()]
        begin = min(place.epoch for place in places)
        part, first = min((place.part, place.first) for place in places if place.epoch == begin)
        for epoch in itertools.count(begin):
            if epoch and not self._settings.repeat:
                return
            for batch in in_batches(self._wanted(epoch, part, first), _text_of, BATCH_CHARACTERS):
                joined, lengths = self._settings.tokenizer.encode_joined([text for _, text in batch])
                ids = np.split(joined.view(np.int32), np.cumsum(lengths)[:-1])
                yield [
                    (document.number % self._settings.lanes, document._replace(ids=own))
                    for (document, _), own in zip(batch, ids, strict=True)
                ]
            part = first = 0

    def _wanted(self, epoch: int, part: int, first: int) -> Iterator[tuple[Document, str]]:
        """What these lanes want of an epoch from a part on, as text yet; the number of its first document is given."""
        # all readers see the same bad documents
        for number, (of_part, text) in enumerate(self._settings.documents(part, say=0 in self._lanes), first):
            if of_part != part:
                part, first = of_part, number
            lane = self._lanes.get(number % self._settings.lanes)
            if lane is not None and lane.wants(epoch, number):
                yield Document(epoch, number, _NO_IDS, part, first), text


_NO_IDS = np.empty(0, dtype=np.int32)


def _text_of(wanted: tuple[Document, str]) -> str:
    return wanted[1]
