"""What must be equal before the runs of two arms may be called matched."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from kvpath.report.arms import Arm, differing, reference_of, stage_name
from kvpath.report.results import Result
from kvpath.report.runs import Run
from kvpath.report.sheets import Sheet
from kvpath.report.statistics import Paired, paired
from kvpath.report.tables import Table, text

PARAMETERS_WITHIN = 0.0005
"""Of each other."""


@dataclass(frozen=True)
class Comparison:
    """An arm against the reference of its stage."""

    arm: Arm
    reference: Arm
    wanted: str
    """What the reference was asked for as."""

    pairs: tuple[tuple[Run, Run], ...]
    """Runs with the same seeds."""

    unmatched: tuple[str, ...]
    """What differs of budgets and data; empty if the two are matched."""

    also: tuple[str, ...]
    """What else differs, which may be meant: a learning rate for each arm, for example."""

    @property
    def matched(self) -> bool:
        """Whether budgets, tokens and their order are the same."""
        return not self.unmatched


def comparisons_of(arms: Sequence[Arm], sheets: Sequence[Sheet], wanted: Sequence[str]) -> list[Comparison]:
    """Each arm against each reference `wanted` at its stage, where there is one."""
    found = []
    for name, arm in product(wanted, arms):
        if (reference := reference_of(arm, arms, name)) is not None:
            by_seed = {run.seed: run for run in reference.runs}
            pairs = tuple((run, by_seed[run.seed]) for run in arm.runs if run.seed in by_seed)
            here = [sheet for sheet in sheets if sheet.seq_len == arm.seq_len]
            unmatched = (*_budgets(arm, reference), *_data(arm, reference, pairs), *_measured(pairs, here))
            also = tuple(key.rsplit(".", 1)[-1] for key in differing(arm.values, reference.values))
            found.append(Comparison(arm, reference, name, pairs, unmatched, also))
    return found


def difference(
    comparison: Comparison, sheet: Sheet, corpus: str | None, context: int, of: Callable[[Result], float | None]
) -> Paired | None:
    """The difference of a figure, pair by pair; of its average over corpora for None. None without pairs."""
    values: list[tuple[float, float]] = []
    for pair in comparison.pairs:
        ours, theirs = (sheet.value(run, corpus, context, of) for run in pair)
        if ours is not None and theirs is not None:
            values.append((ours, theirs))
    return paired([ours for ours, _ in values], [theirs for _, theirs in values]) if values else None


def matched_table(comparisons: Sequence[Comparison]) -> Table:
    """Says of each comparison whether it is one of equals, and if not, why."""
    rows = tuple(
        (
            text(stage_name(comparison.arm.seq_len)),
            text(comparison.arm.name),
            text(comparison.reference.name),
            text("matched" if comparison.matched else "NOT matched"),
            text("; ".join(comparison.unmatched) or "–"),
            text(", ".join(comparison.also) or "–"),
        )
        for comparison in comparisons
    )
    note = (
        f"Matched: parameters within {PARAMETERS_WITHIN:.2%}, equal stored elements, equal tokens, for every pair of"
        " seeds the same stream of training tokens, and the same tokens in every evaluation."
    )
    columns = ("Stage", "Arm", "Against", "Verdict", "What differs", "Other settings")
    return Table("matched", "Of each comparison", columns, rows, (note,))


def _budgets(arm: Arm, reference: Arm) -> Iterator[str]:
    ours, theirs = arm.first, reference.first
    apart = abs(ours.costs.parameters / theirs.costs.parameters - 1)
    if apart > PARAMETERS_WITHIN:
        yield f"parameters {ours.costs.parameters:,} and {theirs.costs.parameters:,} ({apart:.2%} apart)"
    if ours.costs.stored != theirs.costs.stored:
        yield f"stored elements {ours.costs.stored:,.0f} and {theirs.costs.stored:,.0f}"
    tokens = {run.tokens_in_all for run in (*arm.runs, *reference.runs)}
    if len(tokens) > 1:
        yield f"tokens {' and '.join(f'{number:,.0f}' for number in sorted(tokens))}"


def _data(arm: Arm, reference: Arm, pairs: Sequence[tuple[Run, Run]]) -> Iterator[str]:
    if not pairs:
        yield f"no seed in common ({arm.seeds} and {reference.seeds})"
    for run, other in pairs:
        if run.stream_hash is None or other.stream_hash is None:
            yield f"seed {run.seed_text}: the hash of the training tokens is not known"
        elif run.stream_hash != other.stream_hash:
            yield f"seed {run.seed_text}: other training tokens ({run.stream_hash} and {other.stream_hash})"


def _measured(pairs: Sequence[tuple[Run, Run]], sheets: Sequence[Sheet]) -> Iterator[str]:
    both = [sheet for sheet in sheets if all(sheet.has(run) for pair in pairs for run in pair)]
    evaluated = {str(run.path) for pair in pairs for run in pair if any(sheet.has(run) for sheet in sheets)}
    if len(evaluated) == len({run.path for pair in pairs for run in pair}) and evaluated:
        if not both:
            yield "evaluated on different tokens, or in another dtype or stride"
        elif not any(sheet.comparable for sheet in both):
            yield "the tokens of the evaluation have no fingerprint"
