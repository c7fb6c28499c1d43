"""Which documents are trained on and which are held out, and what a tokenised region of them is."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from kvpath.errors import UserError

if TYPE_CHECKING:
    from kvpath.data.packing import TokenRun
    from kvpath.data.sources import Source

Region = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Split:
    """Which document belongs to which region.

    Args:
        holdout_every: of every so many documents the first is validation and the one in the middle is test; None holds
            out none. At least 3.
        rest: the region of all other documents; None leaves them out.
        limit_tokens: regions may end (after a whole document) once each held-out one has so many tokens; where none is
            held out, once the rest has.
    """

    holdout_every: int | None = None
    rest: Region | None = "train"
    limit_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.holdout_every is not None and self.holdout_every < 3:
            raise UserError(f"holdout_every must be at least 3 (validation, test, training), got {self.holdout_every}")

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions that exist."""
        rest: tuple[Region, ...] = (self.rest,) if self.rest else ()
        return rest if self.holdout_every is None else (*rest, "validation", "test")

    def region(self, document: int) -> Region | None:
        """The region of document number ``document`` (see `Source.numbered`); None if it is left out."""
        if self.holdout_every is None:
            return self.rest
        place = document % self.holdout_every
        if place == 0:
            return "validation"
        return "test" if place == self.holdout_every // 2 else self.rest

    def documents(self, source: "Source", region: Region) -> Iterator[str]:
        """The documents of one region of ``source``."""
        return (text for _, text in self.by_part(source, region))

    def by_part(
        self, source: "Source", region: Region, first_part: int = 0, say: bool = True
    ) -> Iterator[tuple[int, str]]:
        """The same from one part of ``source`` on, each with the number of its part.

        Args:
            source: what to read.
            region: which of its documents.
            first_part: the number of the part that is read first.
            say: after each part, how many of its documents could not be decoded.
        """
        parts = source.parts()
        for number, part in enumerate(parts[first_part:], first_part):
            for document, text in part.numbered():
                if self.region(document) == region:
                    yield number, text
            if say:
                source.say_skipped(part.skipped, f", part {number + 1} of {len(parts)}" if len(parts) > 1 else "")


@dataclass(frozen=True)
class Manifest:
    """What there is to know of a tokenised region.

    Args:
        format_version: of the files that hold it.
        source: fingerprint of the source.
        tokenizer: fingerprint of the tokenizer.
        label: what the source is called.
        region: which documents of the source these are.
        dtype: of the tokens: uint16 or uint32.
        n_documents: documents; an end-of-text token follows each.
        n_tokens: tokens, those included.
        n_bytes: UTF-8 bytes of the documents' text.
    """

    format_version: int
    source: str
    tokenizer: str
    label: str
    region: Region
    dtype: str
    n_documents: int
    n_tokens: int
    n_bytes: int


class Corpus(Protocol):
    """A tokenised region. Document i is ``tokens[offsets[i]:offsets[i + 1]]``, its end-of-text token included."""

    @property
    def manifest(self) -> Manifest:
        """Its counts, and what it was made of."""
        ...

    @property
    def tokens(self) -> "TokenRun":
        """(n_tokens,)."""
        ...

    @property
    def offsets(self) -> "TokenRun":
        """(n_documents + 1,)."""
        ...


def dtype_of(vocab_size: int) -> str:
    """The type of stored tokens."""
    return "uint16" if vocab_size < 2**16 else "uint32"
