"""Sources made of sources: a mixture by weights, and a source without some of its documents."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvpath.data.cache import digest
from kvpath.data.sources.base import Part, Source
from kvpath.errors import UserError


@dataclass
class Mixture(Source):
    """Several sources, interleaved by document so that at every point their shares of the text follow the weights.

    Next is always a document of the source that is furthest behind its share; the first of them, if several are. What
    is held out of a source is the same in a mixture, and in another one. A mixture is read in one piece.

    Args:
        sources: what to mix.
        weights: of each source: its share of the characters, in any unit. As many as sources, all positive.
        when_one_ends: stop there (nothing is seen twice, and the shares hold to the end); restart it until each has
            ended once (the shares hold, and the short ones are seen again); or continue with the others (all is seen
            once, and the shares hold among those that are left).
    """

    sources: list[Source]
    weights: list[float]
    when_one_ends: Literal["stop", "restart", "continue"] = "stop"

    def __post_init__(self) -> None:
        problems = []
        if len(self.sources) != len(self.weights) or not self.sources:
            problems.append(f"weights must be one for each of the {len(self.sources)} sources, got {self.weights}")
        problems += [
            f"weights[{i}] must be positive, got {weight}" for i, weight in enumerate(self.weights) if not weight > 0
        ]
        UserError.raise_all(problems)

    @property
    def label(self) -> str:
        total = sum(self.weights)
        pairs = zip(self.sources, self.weights, strict=True)
        return " + ".join(f"{weight / total:.3g} {source.label}" for source, weight in pairs)

    @property
    def skipped(self) -> int:
        return sum(source.skipped for source in self.sources)

    def documents(self) -> Iterator[str]:
        return (text for _, text in self.numbered())

    def numbered(self) -> Iterator[tuple[int, str]]:
        streams = [source.numbered() for source in self.sources]
        characters = [0.0] * len(streams)
        left, ended = set(range(len(streams))), set[int]()
        fresh = set(left)  # nothing has come of these since they began
        while left:
            i = min(left, key=lambda j: (characters[j] / self.weights[j], j))
            pair = next(streams[i], None)
            if pair is not None:
                fresh.discard(i)
                characters[i] += len(pair[1]) + 1  # so that empty documents count, too
                yield pair
            elif self.when_one_ends == "stop":
                return
            elif self.when_one_ends == "continue" or i in fresh:
                left.remove(i)
            else:
                ended.add(i)
                if ended >= left:
                    return
                streams[i] = self.sources[i].numbered()
                fresh.add(i)

    def fingerprint(self) -> str:
        return digest("mixture", [source.fingerprint() for source in self.sources], self.weights, self.when_one_ends)


@dataclass
class Filtered(Source):
    """A source without the documents that do not pass every test stated.

    Args:
        source: what to filter.
        min_characters: shorter documents are left out.
        max_characters: longer documents are left out; null keeps them.
        matches: a regular expression that has to be found somewhere in a document; null asks for none.
        rejects: a regular expression that must not be found anywhere in it; null asks for none.
    """

    source: Source
    min_characters: int = 0
    max_characters: int | None = None
    matches: str | None = None
    rejects: str | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.max_characters is not None and self.max_characters < max(1, self.min_characters):
            problems.append(
                f"max_characters must be at least 1 and min_characters {self.min_characters}, got {self.max_characters}"
            )
        for name in ("matches", "rejects"):
            try:
                re.compile(getattr(self, name) or "")
            except re.error as error:
                problems.append(f"{name} is no regular expression: {error}, got {getattr(self, name)!r}")
        UserError.raise_all(problems)

    @property
    def label(self) -> str:
        return f"{self.source.label}, filtered"

    @property
    def skipped(self) -> int:
        return self.source.skipped

    def documents(self) -> Iterator[str]:
        return (text for _, text in self.numbered())

    def numbered(self) -> Iterator[tuple[int, str]]:
        return _FilteredPart(self.source, self.keeps).numbered()

    def parts(self) -> Sequence[Part]:
        return [_FilteredPart(part, self.keeps) for part in self.source.parts()]

    def keeps(self, text: str) -> bool:
        """Whether a document passes."""
        return (
            len(text) >= self.min_characters
            and (self.max_characters is None or len(text) <= self.max_characters)
            and (self.matches is None or re.search(self.matches, text) is not None)
            and (self.rejects is None or re.search(self.rejects, text) is None)
        )

    def fingerprint(self) -> str:
        tests = (self.min_characters, self.max_characters, self.matches, self.rejects)
        return digest("filtered", self.source.fingerprint(), tests)


@dataclass(frozen=True)
class _FilteredPart:
    part: Part
    keeps: Callable[[str], bool]

    @property
    def skipped(self) -> int:
        return self.part.skipped

    @property
    def n_bytes(self) -> int | None:
        return self.part.n_bytes

    @property
    def fraction(self) -> float | None:
        return self.part.fraction

    def numbered(self) -> Iterator[tuple[int, str]]:
        return ((number, text) for number, text in self.part.numbered() if self.keeps(text))
