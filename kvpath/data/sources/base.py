"""What every source gives: documents, the numbers that hold some of them out, and parts that are read on their own."""

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Literal, Protocol

from kvpath.data.regions import Corpus, Region, Split
from kvpath.errors import UserError

if TYPE_CHECKING:
    from kvpath.data.tokenizer import Tokenizer

BadDocuments = Literal["refuse", "skip"]


class Part(Protocol):
    """A piece of a source that can be read without the others."""

    @property
    def skipped(self) -> int:
        """Documents of the last pass that could not be decoded and were left out."""
        ...

    @property
    def n_bytes(self) -> int | None:
        """What it takes on a disk, if that is known."""
        ...

    @property
    def fraction(self) -> float | None:
        """How much of it the last pass has read, from 0 to 1, if that is known."""
        ...

    def numbered(self) -> Iterator[tuple[int, str]]:
        """Its documents, always in the same order, with their numbers (see `Source.numbered`)."""
        ...


class Source(ABC):
    """A stream of documents that comes out the same each time."""

    @property
    @abstractmethod
    def label(self) -> str:
        """What to call this source in a message or a table."""

    @abstractmethod
    def documents(self) -> Iterator[str]:
        """All documents, always in the same order.

        Raises:
            UserError: for whatever cannot be read, naming where it is.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """A short string that changes whenever the documents would.

        Raises:
            UserError: if the source is not there.
        """

    def numbered(self) -> Iterator[tuple[int, str]]:
        """The same documents, each with the number that decides whether it is held out.

        A number says where a document lies, never when it comes: a filter, a mixture or a limit leaves it as it is, so
        what is held out of a source is the same in all of them.
        """
        return enumerate(self.documents())

    def parts(self) -> Sequence[Part]:
        """Pieces that can be read on their own. One after the other they give the same as ``numbered``."""
        return [self]

    @property
    def skipped(self) -> int:
        """Documents of the last pass that could not be decoded and were left out."""
        return 0

    @property
    def n_bytes(self) -> int | None:
        """What it takes on a disk, if that is known."""
        return None

    @property
    def fraction(self) -> float | None:
        """How much of it the last pass has read, from 0 to 1, if that is known."""
        return None

    def say_skipped(self, skipped: int, of: str = "") -> None:
        """One line on how many documents of a pass (or ``of`` what) could not be decoded, unless it is none."""
        if skipped:
            print(f"{self.label}{of}: {skipped:,} documents could not be decoded: skipped", file=sys.stderr)

    def tokenizer(self, name: str) -> "Tokenizer | None":
        """The tokenizer of a source that comes tokenised, if ``name`` (of the configuration) means that one."""
        return None

    def own_split(self, stated: Split) -> Split:
        """Which document belongs to which region, where ``stated`` may leave that to the source."""
        return stated

    def check(self) -> None:  # noqa: B027 (most keep nothing)
        """Asked once on each machine before its documents are used: is what is kept of them as it was written?

        Raises:
            UserError: naming what is not.
        """

    def corpora(self, tokenizer: "Tokenizer", split: Split) -> Mapping[Region, Corpus]:
        """The regions of ``split``, tokenised: made on first use, then found in the cache.

        Raises:
            UserError: for what cannot be read, no disk space, or what was tokenised otherwise.
        """
        from kvpath.data.corpus import build_corpus  # which stands on sources

        return build_corpus(self, tokenizer, split)


class PartedSource(Source):
    """A source made of pieces; ``max_documents`` ends it within one."""

    max_documents: int | None
    bad_documents: BadDocuments

    @abstractmethod
    def pieces(self) -> Sequence[Part]:
        """All of its pieces, each of which numbers its documents from ``first_number`` of its place on."""

    def documents(self) -> Iterator[str]:
        return (text for _, text in self.numbered())

    def numbered(self) -> Iterator[tuple[int, str]]:
        limit = checked_limit(self.max_documents)
        self._passed: Sequence[Part] = self.pieces()
        return islice((pair for piece in self._passed for pair in piece.numbered()), limit)

    def parts(self) -> Sequence[Part]:
        # how many documents of a piece are left by a limit is known when those before it are read
        return self.pieces() if checked_limit(self.max_documents) is None else [self]

    @property
    def skipped(self) -> int:
        return sum(piece.skipped for piece in getattr(self, "_passed", ()))

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_passed"}


def first_number(part: int) -> int:
    """The number of a part's first document: scattered, so that small parts hold out as large a share as large ones."""
    return int.from_bytes(hashlib.sha256(str(part).encode()).digest()[:5]) if part else 0


def checked_limit(max_documents: int | None) -> int | None:
    """``max_documents``, if it can be one.

    Raises:
        UserError: it is below 1.
    """
    if max_documents is not None and max_documents < 1:
        raise UserError(f"max_documents must be at least 1 or null, got {max_documents}")
    return max_documents
