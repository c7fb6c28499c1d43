"""Results that may stand in one table: of one stage, one dtype, one stride, and the same tokens."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpath.errors import UserError
from kvpath.report.arms import Arm, stage_name
from kvpath.report.printed import CORPORA
from kvpath.report.results import Result
from kvpath.report.runs import Run


class Measure(NamedTuple):
    """What a column of results is of."""

    corpus: str
    context: int


class _Kind(NamedTuple):
    """What results in one table have in common."""

    without_fingerprint: bool
    edition: int
    """Of the tokens: 0, unless tables are mixed."""

    dtype: str
    overlap: str


@dataclass
class Sheet:
    """Results that can be compared with one another."""

    seq_len: int
    title: str
    """What sets the sheet apart from others of its stage; "" for nothing."""

    comparable: bool
    """Whether the tokens are known to be the same."""

    plain: bool
    """Whether the windows do not overlap."""

    found: dict[tuple[str, Measure], Result] = field(default_factory=dict)
    """By the run's path."""

    def result(self, run: Run, measure: Measure) -> Result | None:
        """One run's, if it has it."""
        return self.found.get((str(run.path), measure))

    def found_at(self, measure: Measure, holds: Callable[[Result], bool]) -> Iterator[bool]:
        """Whether something holds, for each result of a measure."""
        return (holds(result) for (_, at), result in self.found.items() if at == measure)

    @property
    def contexts(self) -> list[int]:
        """All of them, the shortest first."""
        return sorted({measure.context for _, measure in self.found})

    @property
    def corpora(self) -> list[str]:
        """All of them, the paper's first and in its order."""
        names = {measure.corpus for _, measure in self.found}
        return sorted(names, key=lambda name: (CORPORA.index(name) if name in CORPORA else len(CORPORA), name))

    def perplexities(self, run: Run, context: int) -> dict[str, float]:
        """Of one run, by corpus."""
        found = {name: self.result(run, Measure(name, context)) for name in self.corpora}
        return {name: result.perplexity for name, result in found.items() if result is not None}

    def average(self, run: Run, context: int) -> float | None:
        """The mean perplexity over the corpora; None if one is missing."""
        return self.value(run, None, context, lambda result: result.perplexity)

    def value(self, run: Run, corpus: str | None, context: int, of: Callable[[Result], float | None]) -> float | None:
        """A figure of one run's result on a corpus, or its mean over all for None; None if one is missing."""
        results = [self.result(run, Measure(name, context)) for name in (self.corpora if corpus is None else [corpus])]
        found = [value for result in results if result is not None and (value := of(result)) is not None]
        return sum(found) / len(found) if found and len(found) == len(results) else None

    def has(self, run: Run) -> bool:
        """Whether there is any result of a run."""
        return any(path == str(run.path) for path, _ in self.found)


def sheets_of(arms: Sequence[Arm], mixed: bool) -> tuple[list[Sheet], list[str]]:
    """The sheets of all stages, and a line for each result that is left out.

    Args:
        arms: finished runs.
        mixed: give a sheet to each set of tokens instead of refusing them.

    Raises:
        UserError: two runs were evaluated on different tokens, and `mixed` does not allow it.
    """
    sheets, left_out = [], []
    for seq_len in sorted({arm.seq_len for arm in arms}):
        sorted_out: dict[_Kind, dict[tuple[str, Measure], Result]] = defaultdict(dict)
        editions: dict[tuple[str, str, int], dict[str, Run]] = defaultdict(dict)
        for run in (run for arm in arms if arm.seq_len == seq_len for run in arm.runs):
            for result in run.results:
                if result.step != run.step:
                    left_out.append(
                        f"{run.path}: its result on {result.corpus} at {result.context:,} is left out: it is of step"
                        f" {result.step:,}, and the run ended at {run.step:,}"
                    )
                    continue
                edition = _edition(editions[result.corpus, result.split, result.context], run, result, mixed)
                kind = _Kind(result.fingerprint is None, edition, result.dtype, _overlap(result))
                sorted_out[kind][str(run.path), _measure(result)] = result
        kinds = sorted(sorted_out)
        sheets += [
            Sheet(seq_len, title, not kind.without_fingerprint, not kind.overlap, sorted_out[kind])
            for kind, title in zip(kinds, _titles(kinds), strict=True)
        ]
    return sheets, left_out


def corpus_name(label: str) -> str:
    """The paper's name of a corpus, else the label of its source."""
    letters = "".join(letter for letter in label.lower() if letter.isalnum())
    if letters in ("c4", "allenaic4") or letters.startswith(("allenaic4en", "c4en", "c4valid")):
        return "C4"
    known = (("finewebedu", "FineWeb-Edu"), ("wikipedia", "Wikipedia"), ("pg19", "PG-19"))
    return next((name for part, name in known if part in letters), label)


def _measure(result: Result) -> Measure:
    split = "" if result.split == "test" else f" ({result.split})"
    return Measure(corpus_name(result.corpus) + split, result.context)


def _edition(seen: dict[str, Run], run: Run, result: Result, mixed: bool) -> int:
    """The number of a result's tokens among those of its corpus and context."""
    if result.fingerprint is None:
        return 0
    seen.setdefault(result.fingerprint, run)
    if len(seen) > 1 and not mixed:
        (one, first), (other, second) = list(seen.items())[:2]
        raise UserError(
            f"{first.path} and {second.path} were evaluated on different tokens of {result.corpus} at context"
            f" {result.context:,}: fingerprints {one} and {other}; their perplexities cannot be compared;"
            " --mixed gives each its own table"
        )
    return list(seen).index(result.fingerprint)


def _overlap(result: Result) -> str:
    return "" if result.stride >= result.context else f"windows with stride {result.stride:,}"


def _titles(kinds: Sequence[_Kind]) -> Iterator[str]:
    """For each sheet what not all of its stage share."""
    for kind in kinds:
        parts = ["without a fingerprint of their tokens: not comparable"] * kind.without_fingerprint
        parts += [f"tokens {'ABCDEFGH'[kind.edition % 8]}"] * any(other.edition for other in kinds)
        parts += [kind.dtype] * (len({other.dtype for other in kinds}) > 1)
        parts += [kind.overlap] * bool(kind.overlap)
        yield ", ".join(parts)


def sheet_title(sheet: Sheet) -> str:
    """For headings."""
    return f"stage {stage_name(sheet.seq_len)}" + f" ({sheet.title})" * bool(sheet.title)
