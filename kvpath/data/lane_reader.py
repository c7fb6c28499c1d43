"""The documents of a stream, read once for several lanes."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvpath.data.corpus import encode_documents, in_batches
from kvpath.data.lanes import BestFitLane, ContiguousLane, Document, Lane, Place, Sequence
from kvpath.data.regions import Split
from kvpath.data.sources import Source
from kvpath.data.tokenizer import Tokenizer
from kvpath.errors import UserError


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

    def documents(self) -> Iterator[str]:
        """The training documents, once."""
        return self.split.documents(self.source, "train")

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
    """Reads the source from the front, tokenises what its lanes want, and passes over the rest as text.

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
        for epoch in itertools.count(min(lane.place.epoch for lane in self._lanes.values())):
            if epoch and not self._settings.repeat:
                return
            for batch in in_batches(self._wanted(epoch), _text_of):
                ids = encode_documents(self._settings.tokenizer, [text for _, _, text in batch])
                yield [
                    (lane, Document(epoch, number, own.astype(np.int32)))
                    for (lane, number, _), own in zip(batch, ids, strict=True)
                ]

    def _wanted(self, epoch: int) -> Iterator[tuple[int, int, str]]:
        """What these lanes want of an epoch: the lane, the number and the text of each document."""
        for number, text in enumerate(self._settings.documents()):
            lane = number % self._settings.lanes
            if lane in self._lanes and self._lanes[lane].wants(epoch, number):
                yield lane, number, text


def _text_of(wanted: tuple[int, int, str]) -> str:
    return wanted[2]
