"""Sequences that are made when they are read, each a pure function of a seed and its number."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvpath.data.order import mix
from kvpath.data.packing import IGNORE

if TYPE_CHECKING:
    from kvpath.data.retrieval.task import Task
    from kvpath.data.tokenizer import Tokenizer

Sequences = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Tokens and labels of several sequences, (N, C) each."""


@dataclass(frozen=True)
class Cell:
    """What is tested by itself.

    Args:
        n_keys: pairs in a sequence; None where there are none.
        depth: where the passkey stands, from 0 (the front) to 1; None where there is none.
    """

    n_keys: int | None = None
    depth: float | None = None


class Examples:
    """Sequences of a task, by number: a `Packing`.

    Args:
        task: makes them.
        tokenizer: whose tokens they are of.
        key: another key, other sequences.
        context: C, tokens in a sequence.
        n_windows: how many there are.
        cell: what they have in common; None mixes all that the task has.
    """

    def __init__(
        self, task: "Task", tokenizer: "Tokenizer", key: int, context: int, n_windows: int, cell: Cell | None = None
    ) -> None:
        self.task, self.tokenizer, self.key, self.cell = task, tokenizer, key, cell
        self.context, self.n_windows = context, n_windows

    def window(self, i: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and labels of sequence i, (C,) each. Any i outside [0, n_windows) gives padding only."""
        tokens_1C, labels_1C = self.batch([i])
        return tokens_1C[0], labels_1C[0]

    def batch(self, numbers: list[int]) -> Sequences:
        """Tokens and labels of several sequences, (N, C) each."""
        numbers_N = np.array(numbers, dtype=np.int64)
        tokens_NC = np.zeros((len(numbers), self.context), dtype=np.int64)
        labels_NC = np.full_like(tokens_NC, IGNORE)
        rows = np.flatnonzero((numbers_N >= 0) & (numbers_N < self.n_windows))
        if rows.size:
            made = self.task.make(self.tokenizer, self.key, numbers_N[rows], self.context, self.cell)
            tokens_NC[rows], labels_NC[rows] = made
        return tokens_NC, labels_NC

    def spans(self, i: int) -> list[tuple[int, int]]:
        """Where sequence i would lie if all stood one after the other, from and to."""
        return [(i * self.context, (i + 1) * self.context)]


def draws(key: int, numbers_N: NDArray[np.int64], each: int) -> NDArray[np.uint64]:
    """Random 64 bits, (N, each): those of a sequence depend on the key and its number alone.

    They are computed here, so that no version of a library can change what a seed stands for.
    """
    own_N = mix(mix(np.array([key], dtype=np.uint64)) ^ numbers_N.astype(np.uint64))
    return mix(own_N[:, None] ^ mix(np.arange(each, dtype=np.uint64)))


def shuffled(draws_NP: NDArray[np.uint64], first: int | None = None) -> NDArray[np.int64]:
    """In each row the numbers from 0 to P - 1 in an order that the draws decide, or the first few of it."""
    return np.argsort(draws_NP, axis=1, kind="stable")[:, :first]
