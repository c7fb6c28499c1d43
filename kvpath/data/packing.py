"""Contiguous windows over a run of tokens: none lost, none read twice."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

IGNORE = -100
"""The label of a position that is not scored."""


class TokenRun(Protocol):
    """Consecutive tokens: an array, or a file that is mapped when it is read."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: slice, /) -> NDArray[np.integer]: ...


class Windows:
    """Window i reads tokens [iC, (i+1)C); its labels are tokens [iC+1, (i+1)C+1).

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
        tokens_C = np.zeros(self.context, dtype=np.int64)
        labels_C = np.full(self.context, IGNORE, dtype=np.int64)
        if 0 <= i < self.n_windows:
            read = self.tokens[i * self.context : (i + 1) * self.context + 1]
            n = len(read) - 1
            tokens_C[:n], labels_C[:n] = read[:-1], read[1:]
        return tokens_C, labels_C
