"""Windows that overlap, so that what is scored has text before it."""

import numpy as np
from numpy.typing import NDArray

from kvpath.data.packing import TokenRun, padding, stacked


class SlidingWindows:
    """Window i reads tokens [iS, iS + C) and scores what no window before it has: the last S labels, the first all C.

    So every token but the first is scored once, outside of the first window with at least C - S tokens before it.

    Args:
        tokens: the run.
        context: C, tokens in a window.
        stride: S, from 1 to C.
    """

    def __init__(self, tokens: TokenRun, context: int, stride: int) -> None:
        self.tokens, self.context, self.stride = tokens, context, stride
        n_labels = max(0, len(tokens) - 1)
        self.n_windows = min(n_labels, 1) + max(0, -(-(n_labels - context) // stride))

    def window(self, i: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and labels of window i, (C,) each. Any i outside [0, n_windows) gives a window of padding only."""
        tokens_C, labels_C = padding(self.context)
        if 0 <= i < self.n_windows:
            start = i * self.stride
            read = self.tokens[start : start + self.context + 1]
            n, first = len(read) - 1, self.context - self.stride if i else 0
            tokens_C[:n], labels_C[first:n] = read[:-1], read[first + 1 :]
        return tokens_C, labels_C

    def batch(self, numbers: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and labels of several windows, (N, C) each."""
        return stacked(self, numbers)

    def spans(self, i: int) -> list[tuple[int, int]]:
        """Where the tokens of window i lie in the run, from and to."""
        return [(i * self.stride, i * self.stride + self.context)]
