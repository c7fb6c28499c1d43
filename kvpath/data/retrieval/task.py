"""What every task gives: a tokenizer of its own, and examples to train and to be tested on."""

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import models, pre_tokenizers

from kvpath.data.cache import digest
from kvpath.data.regions import Corpus, Manifest, Region, Split
from kvpath.data.retrieval.examples import Cell, Examples, Sequences
from kvpath.data.sources.base import Source
from kvpath.data.tokenizer import Tokenizer
from kvpath.errors import UserError

FORMAT_VERSION = 1
"""Of how examples are made: another gives others."""

END_OF_TEXT, UNKNOWN = "<|endoftext|>", "."
"""The first two tokens of a task's own tokenizer; the second stands for words that are none of its own."""


@dataclass(kw_only=True)
class Task(Source):
    """Sequences in which something is asked for, made from a seed. Only what is asked for has a label.

    Args:
        n_examples: sequences to train on, before they come again in another order. They take no room.
        eval_examples: sequences to validate on, and to test on at each context and number of keys or depth.
        seed: another seed, other sequences. Those of training, validation and testing differ in any case.
    """

    n_examples: int = 1_000_000
    eval_examples: int = 200
    seed: int = 0

    whole = False
    """Whether an answer is right only if all labels of its sequence are."""

    @abstractmethod
    def words(self) -> Sequence[str]:
        """The words of its own tokenizer."""

    @abstractmethod
    def cells(self) -> list[Cell]:
        """What is tested by itself."""

    @abstractmethod
    def make(
        self, tokenizer: Tokenizer, key: int, numbers_N: NDArray[np.int64], context: int, cell: Cell | None
    ) -> Sequences:
        """Tokens and labels (N, context) of some sequences."""

    @abstractmethod
    def misfits(self, tokenizer: Tokenizer, context: int) -> Iterator[str]:
        """Why there can be no such sequences."""

    def problems(self) -> Iterator[str]:
        """What is wrong with its fields, each beginning with the field."""
        for name, value, least in (
            ("n_examples", self.n_examples, 1),
            ("eval_examples", self.eval_examples, 1),
            ("seed", self.seed, 0),
        ):
            if value < least:
                yield f"{name} must be at least {least}, got {value}"

    def examples(self, tokenizer: Tokenizer, region: Region, context: int, cell: Cell | None = None) -> Examples:
        """The sequences of a region.

        Args:
            tokenizer: whose tokens they are of.
            region: no two regions share sequences.
            context: tokens in a sequence.
            cell: what they have in common; None mixes all.

        Raises:
            UserError: the context is too short, or the tokenizer does not do.
        """
        UserError.raise_all(f"{self.label}: {misfit}" for misfit in self.misfits(tokenizer, context))
        key = int.from_bytes(
            hashlib.sha256(f"{FORMAT_VERSION} {self.label} {region} {self.seed}".encode()).digest()[:8]
        )
        n = self.n_examples if region == "train" else self.eval_examples
        return Examples(self, tokenizer, key, context, n, cell)

    def manifest(self, tokenizer: Tokenizer, context: int) -> Manifest:
        """Its training sequences as if they were a corpus; one more token, since each has its last label."""
        n = self.n_examples
        return Manifest(
            FORMAT_VERSION, self.fingerprint(), tokenizer.fingerprint, self.label, "train", "", n, n * context + 1, 0
        )

    # As a source ------------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        return type(self).__name__.lower()

    def documents(self) -> Iterator[str]:
        raise UserError(
            f"source {self.label} makes sequences of tokens, and has no text: state it as data.source alone"
        )

    def fingerprint(self) -> str:
        return digest(FORMAT_VERSION, self.label, asdict(self))

    def tokenizer(self, name: str) -> Tokenizer | None:
        return word_tokenizer(self.words()) if name == "train" else None

    def own_split(self, stated: Split) -> Split:
        """Nothing is tokenised."""
        return Split(rest=None)

    def corpora(self, tokenizer: Tokenizer, split: Split) -> Mapping[Region, Corpus]:
        raise UserError(f"source {self.label} makes sequences: state it as data.source, or under data.evaluate")


def word_tokenizer(words: Sequence[str]) -> Tokenizer:
    """One token for each word; words are parted by spaces."""
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([END_OF_TEXT, UNKNOWN, *words]))}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(inner, END_OF_TEXT)
