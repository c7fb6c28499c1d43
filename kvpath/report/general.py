"""Tables of whatever runs were given."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvpath.report.arms import Arm, stage_name
from kvpath.report.matched import Comparison, difference
from kvpath.report.results import Result, Retrieval
from kvpath.report.runs import Run
from kvpath.report.sheets import Sheet, sheet_title
from kvpath.report.statistics import Paired, mean_and_deviation
from kvpath.report.tables import EMPTY, Cell, Table, count, number, text

_Place = tuple[int, str, int, str]
_Asked = tuple[float, int]

NOTHING_TO_SAY = "one seed: nothing can be said"


def runs_table(arms: Sequence[Arm]) -> Table:
    """What each arm is, costs and has seen."""
    rows = tuple(
        (
            text(stage_name(arm.seq_len)),
            text(arm.name),
            text(arm.seeds),
            count(arm.first.costs.parameters),
            count(arm.first.costs.stored),
            count(arm.first.costs.read),
            count(arm.first.costs.stored_bytes),
            count(arm.first.tokens),
            count(arm.first.tokens_in_all),
        )
        for arm in arms
    )
    columns = ("Stage", "Arm", "Seeds", "Parameters", "Stored", "Read", "Bytes", "Tokens", "Tokens in all")
    notes = (
        "Stored: elements of the cache per token of context. Read: elements that a decoding step reads, per token of"
        " context. Bytes: of the cache per token, in BF16. Tokens in all: with those of the stages before.",
    )
    return Table("runs", "Arms", columns, rows, notes)


def perplexity_tables(arms: Sequence[Arm], sheets: Sequence[Sheet]) -> Iterator[Table]:
    """Of each sheet, perplexities and, where they are known, bits per byte, in the shape of the paper's tables."""
    for index, sheet in enumerate(sheets, 1):
        here = [arm for arm in arms if arm.seq_len == sheet.seq_len and any(map(sheet.has, arm.runs))]
        yield _results_table(f"perplexity-{index}", sheet, here, COMPARED["differences"], 2)
        if any(result.bits_per_byte is not None for result in sheet.found.values()):
            yield _results_table(f"bits-per-byte-{index}", sheet, here, COMPARED["bits-differences"], 4)


@dataclass(frozen=True)
class Figure:
    """What of a result is compared."""

    name: str
    of: Callable[[Result], float | None]
    digits: int


COMPARED = {
    "differences": Figure("perplexity", lambda result: result.perplexity, 3),
    "bits-differences": Figure("bits per byte", lambda result: result.bits_per_byte, 4),
}
"""By the beginning of the table's name."""


def difference_table(name: str, sheet: Sheet, comparisons: Sequence[Comparison], figure: Figure) -> Table | None:
    """A figure less that of the reference, with a test over seeds; None where there is nothing to compare."""
    rows: list[tuple[Cell, ...]] = []
    for context in sheet.contexts:
        for comparison in comparisons:
            for corpus in [*sheet.corpora, *([None] if len(sheet.corpora) > 1 else [])]:
                found = difference(comparison, sheet, corpus, context, figure.of)
                if found is not None and comparison.arm.seq_len == sheet.seq_len:
                    base = [sheet.value(other, corpus, context, figure.of) for _, other in comparison.pairs]
                    rows.append(_difference_row(context, comparison, corpus, found, base, figure.digits))
    if not rows:
        return None
    columns = ("Context", "Arm", "Corpus", "Difference", "Percent", "Pairs", "p", "Smallest", "Budgets")
    notes = (
        f"Difference: {figure.name} less that of {comparisons[0].wanted}, the mean over pairs of equal seeds ±"
        " their standard deviation; below zero is better. p: paired t test, two-sided. Smallest: the mean difference"
        " that so many pairs would show at the 5% level with 80% power, if the deviation is what they show. With one"
        " pair nothing can be said of chance. p is of one comparison and not corrected for their number.",
    )
    return Table(
        name,
        f"Differences of {figure.name} to {comparisons[0].wanted}, {sheet_title(sheet)}",
        columns,
        tuple(rows),
        notes,
    )


def retrieval_tables(arms: Sequence[Arm]) -> Iterator[Table]:
    """Accuracy of recall: a table for each stage, task, context and dtype; a column for each depth, number of keys."""
    found: dict[_Place, dict[_Asked, dict[str, list[float]]]] = {}
    for arm in arms:
        for entry in (entry for run in arm.runs for entry in measured(run)):
            place = (arm.seq_len, entry.task, entry.context, entry.dtype)
            asked = (-1.0 if entry.depth is None else entry.depth, entry.n_keys or 0)
            by_arm = found.setdefault(place, {}).setdefault(asked, defaultdict(list))
            by_arm[arm.name].append(entry.accuracy)
    for index, (place, columns) in enumerate(sorted(found.items()), 1):
        seq_len, task, context, dtype = place
        rows = tuple(
            (text(name), *(_accuracy(columns[asked][name]) for asked in sorted(columns)))
            for name in dict.fromkeys(arm.name for arm in arms if arm.seq_len == seq_len)
            if any(columns[asked][name] for asked in columns)
        )
        title = f"Recall: {task} at {stage_name(context)}, stage {stage_name(seq_len)}, {dtype}"
        heads = (_asked_name(*asked) for asked in sorted(columns))
        note = "The share of answers that are right: the mean over seeds ± standard deviation."
        yield Table(f"recall-{index}", title, ("Arm", *heads), rows, (note,))


def _asked_name(depth: float, n_keys: int) -> str:
    return ", ".join([f"depth {depth:g}"] * (depth >= 0) + [f"{n_keys:,} keys"] * (n_keys > 0)) or "all"


def _accuracy(values: Sequence[float]) -> Cell:
    if not values:
        return EMPTY
    mean, spread = mean_and_deviation(values)
    return number(mean, 3, spread)


def measured(run: Run) -> list[Retrieval]:
    """The recall of a run's last step."""
    return [entry for entry in run.retrieval if entry.step == run.step]


def over_seeds(arm: Arm, value: Callable[[Run], float | None], digits: int) -> Cell:
    """The mean over seeds ± their standard deviation; empty if there is none."""
    found = [one for run in arm.runs if (one := value(run)) is not None]
    if not found:
        return EMPTY
    mean, spread = mean_and_deviation(found)
    return number(mean, digits, spread)


def _results_table(name: str, sheet: Sheet, arms: Sequence[Arm], figure: Figure, digits: int) -> Table:
    rows = []
    for context in sheet.contexts:
        for arm in arms:
            places = [*sheet.corpora, None]
            *cells, whole = (
                over_seeds(arm, partial(sheet.value, corpus=corpus, context=context, of=figure.of), digits)
                for corpus in places
            )
            if any(cell != EMPTY for cell in cells):
                rows.append((text(stage_name(context)), text(arm.name), *cells, whole, text(arm.seeds)))
    notes = ["Mean over seeds ± standard deviation."] * any(len(arm.runs) > 1 for arm in arms)
    if not sheet.comparable:
        notes.append("These results say nothing of the tokens that they are of, and are not compared.")
    columns = ("Context", "Arm", *sheet.corpora, "Avg.", "Seeds")
    return Table(name, f"{figure.name.capitalize()}, {sheet_title(sheet)}", columns, tuple(rows), tuple(notes))


def _difference_row(
    context: int, comparison: Comparison, corpus: str | None, found: Paired, base: Sequence[float | None], digits: int
) -> tuple[Cell, ...]:
    known = [value for value in base if value is not None]
    nothing = NOTHING_TO_SAY if found.deviation is None else "no deviation"
    return (
        text(stage_name(context)),
        text(comparison.arm.name),
        text(corpus or "Avg."),
        number(found.mean, digits, found.deviation),
        number(100 * found.mean / (sum(known) / len(known))),
        count(found.pairs),
        text(nothing) if found.p is None else Cell("< 0.0001" if found.p < 1e-4 else f"{found.p:.4f}", found.p),
        number(found.smallest, digits),
        text("matched" if comparison.matched else "NOT matched"),
    )
