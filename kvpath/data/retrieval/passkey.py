"""A passkey: digits that stand at some depth of filler text, and are asked for at its end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvpath.data.packing import IGNORE
from kvpath.data.retrieval.examples import Cell, Sequences, draws
from kvpath.data.retrieval.task import Task
from kvpath.data.tokenizer import Tokenizer

FILLER = (
    " The river runs slowly past the old mill.",
    " A boat is tied to the bank.",
    " Nobody is in it today.",
    " The wind moves the leaves of the tall trees.",
    " Children play on the bridge until it is dark.",
    " Then the lamps are lit, one after the other.",
    " In the morning the market opens again.",
)
BEFORE, AFTER = " The pass key is", ". Remember the pass key."
DIGITS = 10


@dataclass(kw_only=True)
class Passkey(Task):
    """Sentences that repeat, among them once `The pass key is` and digits; at the end the same words, to be continued.

    The digits have labels, and an answer is right if all of them are. It takes any tokenizer that has a token for each
    digit, so a model of text can be tested as it is; to train on it there is one of its own words.

    Args:
        digits: of a key.
        depths: where the key stands, from 0 (the front) to 1 (just before the question); between sentences. Each is
            tested by itself. Training and validation draw any.
        n_examples: sequences to train on, before they come again in another order. They take no room.
        eval_examples: sequences to validate on, and to test on at each context and depth.
        seed: another seed, other sequences. Those of training, validation and testing differ in any case.
    """

    digits: int = 5
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    eval_examples: int = 50

    whole = True

    def words(self) -> Sequence[str]:
        return [*map(str, range(DIGITS)), *" ".join((*FILLER, BEFORE, AFTER)).split()]

    def cells(self) -> list[Cell]:
        return [Cell(depth=depth) for depth in self.depths]

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.digits < 1:
            yield f"digits must be at least 1, got {self.digits}"
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            yield f"depths must name numbers from 0 to 1, got {self.depths}"

    def misfits(self, tokenizer: Tokenizer, context: int) -> Iterator[str]:
        parts = _Parts.of(tokenizer)
        if len(set(parts.digits.tolist())) < DIGITS:
            yield "data.tokenizer has no token of its own for each of the ten digits"
        shortest = self._around(parts) + 1
        if context < shortest:
            yield f"a key of {self.digits} digits and its question need sequences of {shortest} tokens, got {context}"

    def make(
        self, tokenizer: Tokenizer, key: int, numbers_N: NDArray[np.int64], context: int, cell: Cell | None
    ) -> Sequences:
        parts = _Parts.of(tokenizer)
        n_filler = context - self._around(parts)
        tokens_NC = np.empty((len(numbers_N), context), dtype=np.int64)
        labels_NC = np.full_like(tokens_NC, IGNORE)
        for row, drawn in enumerate(draws(key, numbers_N, self.digits + 2)):
            first, depth = int(drawn[0] % np.uint64(len(FILLER))), float(drawn[1] >> np.uint64(11)) / 2**53
            if cell is not None and cell.depth is not None:
                depth = cell.depth
            filler, cut = parts.filler(first, n_filler, depth)
            digits = parts.digits[(drawn[2:] % np.uint64(DIGITS)).astype(np.int64)]
            before, after = (filler[:cut], parts.before, digits, parts.after), (filler[cut:], parts.before, digits[:-1])
            tokens_NC[row] = np.concatenate((*before, *after))
            labels_NC[row, -self.digits :] = digits
        return tokens_NC, labels_NC

    def _around(self, parts: "_Parts") -> int:
        """Tokens that are no filler."""
        return 2 * len(parts.before) + len(parts.after) + 2 * self.digits - 1


@dataclass(frozen=True)
class _Parts:
    """The text in tokens."""

    sentences: list[NDArray[np.int64]]
    before: NDArray[np.int64]
    after: NDArray[np.int64]
    digits: NDArray[np.int64]
    """The token of each digit, (10,)."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "_Parts":
        texts = [*FILLER, BEFORE, AFTER, *map(str, range(DIGITS))]
        ids = [np.array(found, dtype=np.int64) for found in tokenizer.encode_batch(texts)]
        n = len(FILLER)
        # a tokenizer that puts a space before everything has it in front
        return cls(ids[:n], ids[n], ids[n + 1], np.array([found[-1] for found in ids[n + 2 :]]))

    def filler(self, first: int, n: int, depth: float) -> tuple[NDArray[np.int64], int]:
        """The sentences from ``first`` on, (n,), and where one ends that is nearest to ``depth``."""
        around = [*self.sentences[first:], *self.sentences[:first]]
        once = np.concatenate(around)
        ends = np.cumsum([0] + [len(sentence) for sentence in around] * (n // len(once) + 1))
        ends = np.append(ends[ends < n], n)
        return np.resize(once, n), int(ends[np.abs(ends - depth * n).argmin()])
