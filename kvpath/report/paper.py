"""The paper's tables: what it prints, and below it what those of the given runs say that have the same budget."""

from collections.abc import Callable, Iterator, Sequence

from kvpath.report.arms import Arm, stage_name
from kvpath.report.matched import PARAMETERS_WITHIN
from kvpath.report.printed import (
    ABLATION_LABEL,
    ABLATION_REFERENCE,
    ABLATIONS,
    BILLION,
    BILLION_LABEL,
    CONTEXTS,
    CORPORA,
    MAIN,
    MLA,
    Budget,
    Printed,
)
from kvpath.report.runs import Run
from kvpath.report.sheets import Measure, Sheet
from kvpath.report.statistics import mean_and_deviation
from kvpath.report.tables import EMPTY, Cell, Table, count, number, text

TOKENS_WITHIN = 0.01
"""Of the paper's, which are approximate."""

ABLATION_CORPUS = "FineWeb-Edu"
"""The paper does not say what its ablations are measured on; it is what they are trained on."""

AVERAGE = "Avg."
_HOW = (
    "Printed: figures of the paper. Ours: runs of the same layout, parameters (within 0.05%), stored elements and"
    " tokens (within 1%), whatever they are called; empty where there is none."
)


def paper_tables(arms: Sequence[Arm], sheets: Sequence[Sheet]) -> Iterator[Table]:
    """All of them, those without a run of ours too."""
    fill = Filling(arms, sheets)
    yield _results(MAIN, "paper-main", fill)
    yield _gains(MAIN, "paper-main-gains", fill)
    yield _results(MLA, "paper-mla", fill)
    yield _gains(MLA, "paper-mla-gains", fill)
    yield _ablations(fill)
    yield _billion(fill)


def fits(run: Run, budget: Budget) -> bool:
    """Whether a run is one that the paper's row is of."""
    backbone, (layout, values) = run.config["model"]["backbone"], run.attention
    return (
        layout == budget.layout
        and all(values.get(name) == value for name, value in budget.values.items())
        and budget.d_model in (None, backbone["d_model"])
        and budget.n_layers in (None, backbone["n_layers"])
        and budget.seq_len in (None, run.seq_len)
        and budget.stored in (None, run.costs.stored)
        and abs(run.costs.parameters / budget.parameters - 1) <= PARAMETERS_WITHIN
        and abs(run.tokens_in_all / budget.tokens - 1) <= TOKENS_WITHIN
    )


class Filling:
    """What of the given runs stands in the paper's cells."""

    def __init__(self, arms: Sequence[Arm], sheets: Sequence[Sheet]) -> None:
        """Of sheets, those count whose tokens are known and whose windows do not overlap; the fullest of a stage."""
        self.arms = arms
        self._sheets: dict[int, Sheet] = {}
        for sheet in sorted(sheets, key=lambda sheet: len(sheet.found)):
            if sheet.comparable and sheet.plain:
                self._sheets[sheet.seq_len] = sheet

    def runs(self, budget: Budget) -> list[Run]:
        """Those of a budget, over seeds; of several arms that have it, the one with most seeds."""
        fitting = [arm for arm in self.arms if fits(arm.first, budget)]
        return list(max(fitting, key=lambda arm: len(arm.runs)).runs) if fitting else []

    def perplexities(self, budget: Budget, corpus: str, context: int) -> list[float]:
        """One for each seed; the mean over CORPORA for AVERAGE."""
        return [value for run in self.runs(budget) if (value := self._perplexity(run, corpus, context)) is not None]

    def _perplexity(self, run: Run, corpus: str, context: int) -> float | None:
        sheet = self._sheets.get(run.seq_len)
        if sheet is None:
            return None
        if corpus == AVERAGE:
            found = sheet.perplexities(run, context)
            return sum(found[name] for name in CORPORA) / len(CORPORA) if set(CORPORA) <= set(found) else None
        result = sheet.result(run, Measure(corpus, context))
        return result.perplexity if result is not None else None

    def cell(self, budget: Budget, corpus: str, context: int) -> Cell:
        """The mean over seeds ± their deviation."""
        return _over_seeds(self.perplexities(budget, corpus, context), 2)


def relative_gain(perplexity: float, reference: float) -> float:
    """Percent less than the reference."""
    return 100 * (1 - perplexity / reference)


def _over_seeds(values: Sequence[float], digits: int) -> Cell:
    if not values:
        return EMPTY
    mean, spread = mean_and_deviation(values)
    return number(mean, digits, spread)


def _results(printed: Printed, name: str, fill: Filling) -> Table:
    rows = []
    for (context, model), values in printed.rows.items():
        columns = zip(*(row for (at, _), row in printed.rows.items() if at == context), strict=True)
        lowest = [min(column) for column in columns]
        theirs = [number(value, printed=True, best=value == low) for value, low in zip(values, lowest, strict=True)]
        ours = [fill.cell(printed.models[model], corpus, context) for corpus in (*CORPORA, AVERAGE)]
        head = (text(stage_name(context)), text(model))
        rows += [(*head, Cell("printed", printed=True), *theirs), (*head, text("ours"), *ours)]
    return Table(
        name,
        f"{printed.title}: perplexity of the final 32K checkpoints ({printed.label})",
        ("Context", "Model", "Source", *CORPORA, AVERAGE),
        tuple(rows),
        (_HOW,),
    )


def _gains(printed: Printed, name: str, fill: Filling) -> Table:
    """Percent by which averages are lower than the reference's."""

    def row(source: str, gain: Callable[[int, int], Cell]) -> tuple[Cell, ...]:
        kind = Cell(source, printed=source != "ours")
        return (text(model), kind, *(gain(index, context) for index, context in enumerate(CONTEXTS)))

    def ours(index: int, context: int) -> Cell:
        mine = fill.perplexities(printed.models[model], AVERAGE, context)
        base = fill.perplexities(printed.models[printed.reference], AVERAGE, context)
        if not mine or not base:
            return EMPTY
        return number(relative_gain(mean_and_deviation(mine)[0], mean_and_deviation(base)[0]))

    rows = []
    for model, stated in printed.gains.items():
        rows.append(row("printed", lambda index, context: number(stated[index], printed=True)))  # noqa: B023
        recomputed = [recomputed_gain(printed, model, context) for context in CONTEXTS]
        rows.append(row("from the printed perplexities", lambda index, _: number(recomputed[index], printed=True)))  # noqa: B023
        rows.append(row("ours", ours))
    note = "The printed gains follow from the printed perplexities to within 0.02, which is what rounding leaves."
    return Table(
        name,
        f"{printed.title}: average perplexity below {printed.reference}'s, percent",
        ("Model", "Source", *map(stage_name, CONTEXTS)),
        tuple(rows),
        (note,),
    )


def recomputed_gain(printed: Printed, model: str, context: int) -> float:
    """From the printed perplexities, whose mean is less rounded than the printed average."""
    ours, theirs = (sum(printed.rows[context, name][:-1]) for name in (model, printed.reference))
    return relative_gain(ours, theirs)


def _ablations(fill: Filling) -> Table:
    rows = []
    for name, budget in ABLATIONS.items():
        sizes = (count(budget.parameters, printed=True), count(budget.stored, printed=True))
        is_reference = budget == next(iter(ABLATIONS.values()))
        stated = [number(value, 4, printed=True) if is_reference else EMPTY for value in ABLATION_REFERENCE]
        rows.append((text(name), Cell("printed", printed=True), *sizes, *stated))
        runs = fill.runs(budget)
        costs = (count(runs[0].costs.parameters), count(runs[0].costs.stored)) if runs else (EMPTY, EMPTY)
        found = [_over_seeds(fill.perplexities(budget, ABLATION_CORPUS, context), 4) for context in CONTEXTS]
        rows.append((text(name), text("ours"), *costs, *found))
    notes = (
        _HOW,
        "The perplexities of the reference are as printed. The paper's caption takes them from its main table, in"
        " which they do not stand, so they are not called reproduced.",
        f"The paper does not say what these are measured on; ours are on {ABLATION_CORPUS}, of the final checkpoint.",
    )
    columns = ("Configuration", "Source", "Params", "KV/token", *(f"{stage_name(at)} PPL" for at in CONTEXTS))
    return Table("paper-ablation", f"Ablations of KVPath-I ({ABLATION_LABEL})", columns, tuple(rows), notes)


def _billion(fill: Filling) -> Table:
    rows = []
    for model, budget in BILLION.items():
        theirs = (Cell("~1.0B", printed=True), Cell("100B", printed=True), EMPTY, EMPTY)
        rows.append((text(model), Cell("printed", printed=True), *theirs))
        runs = fill.runs(budget)
        if runs:
            losses = [run.validation_perplexity for run in runs]
            known = [loss for loss in losses if loss is not None]
            found = (
                count(runs[0].costs.parameters),
                count(runs[0].tokens_in_all),
                count(runs[0].costs.stored),
                _over_seeds(known, 2),
            )
        else:
            found = (EMPTY, EMPTY, EMPTY, EMPTY)
        rows.append((text(model), text("ours"), *found))
    note = "Planned: the paper prints no results. PPL: the final validation's. KVPath-I is KVPath-Concat."
    columns = ("Model", "Source", "Params", "Tokens", "KV/token", "PPL")
    return Table("paper-1b", f"Planned comparison at 1.0B ({BILLION_LABEL})", columns, tuple(rows), (note,))
