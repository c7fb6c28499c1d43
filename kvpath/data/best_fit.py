"""Documents packed whole where they fit: sequences that begin with a document, padded where nothing fits."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped]

from kvpath.data.cache import build_once, cache_dir, digest
from kvpath.data.mapped import MappedArray
from kvpath.data.packing import TokenRun, padding, stacked
from kvpath.data.regions import Corpus

_ENDS, _STARTS, _LENGTHS = "ends.bin", "starts.bin", "lengths.bin"


class Rows(NamedTuple):
    """Which pieces of documents make which sequence: those of row i are [ends[i], ends[i + 1]) of the other two."""

    ends: NDArray[np.int64]
    """(rows + 1,), the first is 0."""

    starts: NDArray[np.int64]
    """(pieces,): where a piece begins in the run of tokens."""

    lengths: NDArray[np.int64]
    """(pieces,): its tokens, 1 to the sequence's length."""


def pack_documents(bounds: NDArray[np.int64], context: int) -> Rows:
    """Best fit, the longest first: each piece goes into the fullest row that has room for it.

    A document longer than a sequence is cut into pieces of a whole sequence and a rest. Rows come in the order of the
    first document in them, and so do the pieces of a row.

    Args:
        bounds: (documents + 1,): document i is tokens [bounds[i], bounds[i + 1]) of the run.
        context: tokens in a sequence.
    """
    per_document = -(-np.diff(bounds) // context)
    document = np.repeat(np.arange(len(per_document)), per_document)
    number = np.arange(len(document)) - np.repeat(np.cumsum(per_document) - per_document, per_document)
    starts = bounds[document] + number * context
    lengths = np.minimum(context, bounds[document + 1] - starts)
    bins = _best_fit(lengths, context)
    n_rows = int(bins.max(initial=-1)) + 1
    first = np.full(n_rows, np.iinfo(np.int64).max)
    np.minimum.at(first, bins, starts)
    row = np.argsort(np.argsort(first))[bins]
    order = np.lexsort((starts, row))
    ends = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=n_rows))])
    return Rows(ends.astype(np.int64), starts[order], lengths[order])


def _best_fit(sizes: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """The bin of each piece."""
    bins = np.empty(len(sizes), dtype=np.int64)
    free: list[tuple[int, int]] = []  # (room left, bin), sorted
    n_bins = 0
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        fits = bisect_left(free, (size, 0))
        if fits < len(free):
            left, chosen = free.pop(fits)
        else:
            left, chosen = room, n_bins
            n_bins += 1
        bins[piece] = chosen
        if left > size:
            insort(free, (left - size, chosen))
    return bins


def read_row(
    tokens: TokenRun, starts: NDArray[np.integer], lengths: NDArray[np.integer], context: int, end_of_text: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens and labels of a row, (context,) each.

    The last token of a piece predicts the next of its document; the end of a document predicts nothing, since what
    stands after it is chance.
    """
    tokens_C, labels_C = padding(context)
    place = 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        read = tokens[start : start + length + 1]
        tokens_C[place : place + length] = read[:length]
        n_labels = length - 1 if read[length - 1] == end_of_text else length
        labels_C[place : place + n_labels] = read[1 : n_labels + 1]
        place += length
    return tokens_C, labels_C


class BestFit:
    """Best fit within every ``group`` documents. The plan is made once, kept in the cache, and mapped.

    Args:
        corpus: what to pack.
        key: names the corpus's content.
        context: tokens in a sequence.
        group: documents that are packed together: a function of the corpus and of this number alone.
        end_of_text: the token that ends a document.

    Raises:
        UserError: if the disk is full.
    """

    def __init__(self, corpus: Corpus, key: str, context: int, group: int, end_of_text: int) -> None:
        self.tokens, self.context, self._end_of_text = corpus.tokens, context, end_of_text
        name = digest("best fit", 1, key, context, group)[:32]
        plan = build_once(
            cache_dir() / "packing" / name, lambda folder: _write_plan(corpus.offsets, context, group, folder)
        )
        self.n_windows = (plan / _ENDS).stat().st_size // 8 - 1
        n_pieces = (plan / _STARTS).stat().st_size // 8
        self._ends = MappedArray(plan / _ENDS, np.int64, self.n_windows + 1)
        self._starts = MappedArray(plan / _STARTS, np.int64, n_pieces)
        self._lengths = MappedArray(plan / _LENGTHS, np.uint32, n_pieces)

    def window(self, i: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and labels of sequence i, (C,) each. Any i outside [0, n_windows) gives padding only."""
        if not 0 <= i < self.n_windows:
            return padding(self.context)
        starts, lengths = self._pieces(i)
        return read_row(self.tokens, starts, lengths, self.context, self._end_of_text)

    def batch(self, numbers: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and labels of several sequences, (N, C) each."""
        return stacked(self, numbers)

    def spans(self, i: int) -> list[tuple[int, int]]:
        """Where the pieces of sequence i lie in the run, from and to."""
        starts, lengths = self._pieces(i)
        return list(zip(starts.tolist(), (starts + lengths).tolist(), strict=True))

    def _pieces(self, i: int) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
        pieces = slice(*self._ends[i : i + 2].tolist())
        return self._starts[pieces], self._lengths[pieces]


def _write_plan(offsets: TokenRun, context: int, group: int, folder: Path) -> None:
    with (
        (folder / _ENDS).open("wb") as ends,
        (folder / _STARTS).open("wb") as starts,
        (folder / _LENGTHS).open("wb") as lengths,
    ):
        ends.write(np.int64(0).tobytes())
        n_pieces = 0
        for rows in _groups(offsets, context, group):
            ends.write((rows.ends[1:] + n_pieces).tobytes())
            starts.write(rows.starts.tobytes())
            lengths.write(rows.lengths.astype(np.uint32).tobytes())
            n_pieces += len(rows.starts)


def _groups(offsets: TokenRun, context: int, group: int) -> Iterator[Rows]:
    n_documents = len(offsets) - 1
    for first in tqdm(range(0, n_documents, group), desc="packing", unit=f" x {group} documents", delay=2):
        yield pack_documents(offsets[first : first + group + 1].astype(np.int64), context)
