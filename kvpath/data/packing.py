"""Which tokens a sequence reads, and what documents make of it."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

IGNORE = -100
"""The label of a position that is not scored."""


class TokenRun(Protocol):
    """Consecutive tokens: an array, or a file that is mapped when it is read."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: slice, /) -> NDArray[np.integer]: ...


class Packing(Protocol):
    """Sequences of one length, by number."""

    @property
    def context(self) -> int:
        """C, tokens in a sequence."""
        ...

    @property
    def n_windows(self) -> int:
        """How many there are."""
        ...

    def window(self, i: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and labels of sequence i, (C,) each. Any i outside [0, n_windows) gives padding only."""
        ...

    def batch(self, numbers: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and labels of several sequences, (N, C) each, to be read alone: they may share memory."""
        ...

    def spans(self, i: int) -> list[tuple[int, int]]:
        """Where the tokens of sequence i lie in the run, from and to."""
        ...


class Windows:
    """Contiguous: window i reads tokens [iC, (i+1)C); its labels are tokens [iC+1, (i+1)C+1).

    Args:
        tokens: the run to cut up.
        context: C, tokens in a window.
        short_last: keep a last window that is not full, padded with ``IGNORE`` labels, so that every token but the
            first is a label exactly once, whatever C is. Otherwise only full windows are kept.
    """

    def __init__(self, tokens: TokenRun, context: int, short_last: bool = False) -> None:
        self.tokens = tokens
        self.context = context
        n_labels = max(0, len(tokens) - 1)
        self.n_windows = -(-n_labels // context) if short_last else n_labels // context

    def window(self, i: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and labels of window i, (C,) each. Any i outside [0, n_windows) gives a window of padding only."""
        tokens_C, labels_C = padding(self.context)
        if 0 <= i < self.n_windows:
            read = self.tokens[i * self.context : (i + 1) * self.context + 1]
            n = len(read) - 1
            tokens_C[:n], labels_C[:n] = read[:-1], read[1:]
        return tokens_C, labels_C

    def batch(self, numbers: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and labels of several windows, (N, C) each, to be read alone: they may share memory."""
        n_full = (len(self.tokens) - 1) // self.context
        if min(numbers, default=0) < 0 or max(numbers, default=0) >= n_full:
            return stacked(self, numbers)
        read = np.empty((len(numbers), self.context + 1), dtype=np.int64)
        for row, i in enumerate(numbers):
            read[row] = self.tokens[i * self.context : (i + 1) * self.context + 1]
        return read[:, :-1], read[:, 1:]

    def spans(self, i: int) -> list[tuple[int, int]]:
        """Where the tokens of window i lie in the run, from and to."""
        return [(i * self.context, (i + 1) * self.context)]


def stacked(packing: Packing, numbers: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens and labels of several sequences, one by one, (N, C) each."""
    both = np.empty((2, len(numbers), packing.context), dtype=np.int64)
    for row, i in enumerate(numbers):
        both[0, row], both[1, row] = packing.window(i)
    return both[0], both[1]


def padding(context: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens and labels of a sequence that holds nothing, (context,) each."""
    return np.zeros(context, dtype=np.int64), np.full(context, IGNORE, dtype=np.int64)


def part_documents(
    tokens_T: NDArray[np.int64], labels_T: NDArray[np.int64], end_of_text: int
) -> dict[str, NDArray[np.int64]]:
    """A batch in which each document stands alone: ``tokens``, ``labels``, ``documents`` and ``positions``.

    An end-of-text token belongs to the document that it ends, and predicts nothing. Documents are numbered within each
    sequence, and positions count from 0 in each: in a document that a sequence begins in the middle of, too.

    Args:
        tokens_T: sequences along the last axis, of any shape.
        labels_T: of the same shape.
        end_of_text: the token that ends a document, and stands nowhere else.
    """
    ends = tokens_T == end_of_text
    begins = np.zeros_like(ends)
    begins[..., 1:] = ends[..., :-1]
    place = np.arange(tokens_T.shape[-1])
    first = np.maximum.accumulate(np.where(begins, place, 0), axis=-1)
    return {
        "tokens": tokens_T,
        "labels": np.where(ends, IGNORE, labels_T),
        "documents": np.cumsum(begins, axis=-1, dtype=np.int64),
        "positions": place - first,
    }
