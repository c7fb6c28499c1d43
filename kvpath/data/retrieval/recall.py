"""Multi-query associative recall: keys with values, then the keys again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvpath.data.packing import IGNORE
from kvpath.data.retrieval.examples import Cell, Sequences, draws, shuffled
from kvpath.data.retrieval.task import Task, word_tokenizer
from kvpath.data.tokenizer import Tokenizer

_GAP, _FIRST_KEY = 1, 2


@dataclass(kw_only=True)
class Recall(Task):
    """Pairs of a key and its value come first; then each key once more, in another order and between gaps of one token.

    The label of such a key is its value, and nothing else has one. Keys of a sequence differ, values may be equal.

    Args:
        n_keys: pairs in a sequence. Training mixes these numbers; each is tested by itself. A sequence of T tokens has
            room for T / 3.
        keys: different keys that there are. With values it decides the vocabulary: keys + values + 2.
        values: different values that there are.
        n_examples: sequences to train on, before they come again in another order. They take no room.
        eval_examples: sequences to validate on, and to test on at each context and number of keys.
        seed: another seed, other sequences. Those of training, validation and testing differ in any case.
    """

    n_keys: list[int] = field(default_factory=lambda: [4, 16])
    keys: int = 128
    values: int = 128

    def words(self) -> Sequence[str]:
        return [*(f"k{i}" for i in range(self.keys)), *(f"v{i}" for i in range(self.values))]

    def cells(self) -> list[Cell]:
        return [Cell(n_keys=n) for n in self.n_keys]

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.n_keys or min(self.n_keys) < 1:
            yield f"n_keys must name numbers of at least 1, got {self.n_keys}"
        elif self.keys < max(self.n_keys):
            yield f"keys must be at least the largest of n_keys {self.n_keys}, got {self.keys}"
        if self.values < 2:
            yield f"values must be at least 2, got {self.values}"

    def misfits(self, tokenizer: Tokenizer, context: int) -> Iterator[str]:
        if context < 3 * max(self.n_keys):
            yield f"n_keys {max(self.n_keys)} need sequences of {3 * max(self.n_keys)} tokens, got {context}"
        if tokenizer.fingerprint != word_tokenizer(self.words()).fingerprint:
            yield (
                f"keys {self.keys} and values {self.values} make another vocabulary than data.tokenizer has: state"
                " those that the model is trained with (a model of text is tested by eval/passkey)"
            )

    def make(
        self, tokenizer: Tokenizer, key: int, numbers_N: NDArray[np.int64], context: int, cell: Cell | None
    ) -> Sequences:
        if cell is not None:
            return self._of(int(cell.n_keys or 0), key, numbers_N, context)
        made = np.empty((2, len(numbers_N), context), dtype=np.int64)
        kind_N = draws(key ^ 1, numbers_N, 1)[:, 0] % np.uint64(len(self.n_keys))
        for kind, n in enumerate(self.n_keys):
            if (rows := np.flatnonzero(kind_N == kind)).size:
                made[:, rows] = self._of(n, key, numbers_N[rows], context)
        return made[0], made[1]

    def _of(self, n: int, key: int, numbers_N: NDArray[np.int64], context: int) -> Sequences:
        free = context - 2 * n
        parts = np.cumsum([self.keys, n, free])
        of_keys, of_values, of_places, of_order = np.split(draws(key, numbers_N, int(parts[-1]) + n), parts, axis=1)
        keys_Nn = _FIRST_KEY + shuffled(of_keys, n)
        values_Nn = _FIRST_KEY + self.keys + (of_values % np.uint64(self.values)).astype(np.int64)
        places_Nn, order_Nn = 2 * n + shuffled(of_places, n), shuffled(of_order)
        tokens_NC = np.full((len(numbers_N), context), _GAP, dtype=np.int64)
        labels_NC = np.full_like(tokens_NC, IGNORE)
        tokens_NC[:, 0 : 2 * n : 2], tokens_NC[:, 1 : 2 * n : 2] = keys_Nn, values_Nn
        np.put_along_axis(tokens_NC, places_Nn, np.take_along_axis(keys_Nn, order_Nn, 1), 1)
        np.put_along_axis(labels_NC, places_Nn, np.take_along_axis(values_Nn, order_Nn, 1), 1)
        return tokens_NC, labels_NC
