"""The figures of a report."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath

from kvpath.report.arms import Arm, stage_name
from kvpath.report.curves import Points, smoothed, thinned
from kvpath.report.general import measured
from kvpath.report.matched import Comparison
from kvpath.report.plotting import Axis, Figure, Line, chart
from kvpath.report.results import Result
from kvpath.report.runs import Run
from kvpath.report.sheets import Measure, Sheet, sheet_title
from kvpath.report.statistics import mean_and_deviation

_AFTER = 0.1
"""The share of a curve that does not decide where the axis ends: a loss falls from far above at first."""


def figures_of(
    finished: Sequence[Arm], sheets: Sequence[Sheet], unfinished: Sequence[Arm], comparisons: Sequence[Comparison]
) -> Iterator[Figure]:
    """All figures for which there is something to show.

    Args:
        finished: arms for all figures.
        sheets: their results.
        unfinished: arms that are in the curves over tokens alone.
        comparisons: of finished arms with their reference.
    """
    colours = colours_of([*finished, *unfinished])
    for index, sheet in enumerate(sheets, 1):
        here = [arm for arm in finished if arm.seq_len == sheet.seq_len]
        yield from _over_cache(index, sheet, here, colours)
        first = [comparison for comparison in comparisons if comparison.wanted == comparisons[0].wanted]
        against = [comparison for comparison in first if comparison.arm.seq_len == sheet.seq_len]
        for number, corpus in enumerate(sheet.corpora, 1):
            contexts = [at for at in sheet.contexts if any(sheet.found_at(Measure(corpus, at), _has_positions))]
            if contexts:
                place, measure = f"{index}-{number}", Measure(corpus, contexts[-1])
                yield from _by_position(place, sheet, measure, here, colours)
                if sheet.comparable:
                    yield from _against(place, sheet, measure, against, colours)
    for seq_len in sorted({arm.seq_len for arm in (*finished, *unfinished)}):
        done, not_done = ([arm for arm in arms if arm.seq_len == seq_len] for arms in (finished, unfinished))
        yield from _over_tokens(seq_len, done, not_done, colours)
        yield from _recall(seq_len, done, colours)


def colours_of(arms: Sequence[Arm]) -> dict[str, int]:
    """A number for each name of an arm, the same at every stage."""
    return {name: number for number, name in enumerate(dict.fromkeys(arm.name for arm in arms))}


def _over_cache(index: int, sheet: Sheet, arms: Sequence[Arm], colours: Mapping[str, int]) -> Iterator[Figure]:
    context = sheet.contexts[-1]
    points: list[tuple[Arm, float, float | None]] = []
    for arm in arms:
        found = [value for run in arm.runs if (value := sheet.average(run, context)) is not None]
        if found:
            points.append((arm, *mean_and_deviation(found)))
    kinds: tuple[tuple[str, Callable[[Run], float]], ...] = (
        ("stored", lambda run: run.costs.stored_bytes),
        ("read", lambda run: run.costs.read_bytes),
    )
    for kind, cost in kinds if points else ():
        lines = [
            Line(((cost(arm.first), mean),), arm.name, colours[arm.name], (spread,), joined=False, marked=True)
            for arm, mean, spread in points
        ]
        costs = [cost(arm.first) for arm, *_ in points]
        what = "Cache bytes stored, per token" if kind == "stored" else "Cache bytes read a step, per token of context"
        yield Figure(
            f"cache-{kind}-{index}",
            f"Perplexity against cache bytes {kind}, {sheet_title(sheet)}",
            chart(
                f"Perplexity against cache bytes {kind}",
                Axis(f"{what} (BF16)", log=max(costs) > 8 * min(costs)),
                Axis(f"Perplexity at {stage_name(context)}"),
                lines,
            ),
            f"Mean over {', '.join(sheet.corpora)}; bars are standard deviations over seeds.",
        )


_POSITIONS = Axis("Positions in the window up to", log=True, powers_of_two=True)


def _by_position(
    place: str, sheet: Sheet, measure: Measure, arms: Sequence[Arm], colours: Mapping[str, int]
) -> Iterator[Figure]:
    lines: list[Line] = []
    for arm in arms:
        seeds = [points for run in arm.runs if (points := _positions(sheet.result(run, measure)))]
        lines += _with_mean(seeds, arm, colours)
    if lines:
        title = f"Perplexity by position on {measure.corpus} at {stage_name(measure.context)}, {sheet_title(sheet)}"
        caption = "Each point is of the positions from half of it on." + _THIN * any(line.thin for line in lines)
        svg = chart(title, _POSITIONS, Axis("Perplexity", log=True), lines)
        yield Figure(f"position-{place}", title, svg, caption)


def _against(
    place: str, sheet: Sheet, measure: Measure, comparisons: Sequence[Comparison], colours: Mapping[str, int]
) -> Iterator[Figure]:
    """The same relative to the reference, where differences of a few percent can be seen."""
    lines: list[Line] = []
    for comparison in comparisons:
        seeds: list[Points] = []
        for run, other in comparison.pairs:
            base = dict(_positions(sheet.result(other, measure)))
            ours = _positions(sheet.result(run, measure))
            if points := tuple((x, 100 * (y / base[x] - 1)) for x, y in ours if x in base):
                seeds.append(points)
        lines += _with_mean(seeds, comparison.arm, colours)
    if lines:
        reference = comparisons[0].wanted
        title = f"The same against {reference}, {measure.corpus}, percent, {sheet_title(sheet)}"
        svg = chart(title, _POSITIONS, Axis(f"Perplexity against {reference}, percent"), lines)
        yield Figure(f"position-against-{place}", title, svg, "Below zero is better.")


_THIN = " Thin lines are seeds."


def _over_tokens(
    seq_len: int, arms: Sequence[Arm], unfinished: Sequence[Arm], colours: Mapping[str, int]
) -> Iterator[Figure]:
    kinds: tuple[tuple[str, Callable[[Run], Points]], ...] = (
        ("training", lambda run: smoothed(run.curves.training)),
        ("validation", lambda run: thinned(run.curves.validation)),
    )
    for kind, curve in kinds:
        lines: list[Line] = []
        for arm, done in [*((arm, True) for arm in arms), *((arm, False) for arm in unfinished)]:
            label = arm.name + " (unfinished)" * (not done)
            lines += [
                Line(curve(run), label, colours[arm.name], thin=len(arm.runs) > 1, dashed=not done) for run in arm.runs
            ]
        settled = [y for line in lines for y in _settled(line.points)]
        if settled:
            yield Figure(
                f"{kind}-{stage_name(seq_len)}",
                f"{kind.capitalize()} loss over tokens, stage {stage_name(seq_len)}",
                chart(
                    f"{kind.capitalize()} loss over tokens",
                    Axis("Tokens of this stage"),
                    Axis("Nats per token", high=max(settled)),
                    lines,
                ),
                ("Smoothed. " if kind == "training" else "") + "One line a run, one colour an arm.",
            )


def _recall(seq_len: int, arms: Sequence[Arm], colours: Mapping[str, int]) -> Iterator[Figure]:
    tasks = {(entry.task, entry.context) for arm in arms for run in arm.runs for entry in measured(run)}
    for number, (task, context) in enumerate(sorted(tasks), 1):
        lines: list[Line] = []
        for arm in arms:
            seeds: list[Points] = []
            for run in arm.runs:
                by_depth: dict[float, list[float]] = defaultdict(list)
                for entry in measured(run):
                    if (entry.task, entry.context) == (task, context) and entry.depth is not None:
                        by_depth[entry.depth].append(entry.accuracy)
                if by_depth:
                    seeds.append(tuple((depth, sum(all_) / len(all_)) for depth, all_ in sorted(by_depth.items())))
            lines += _with_mean(seeds, arm, colours)
        if lines:
            yield Figure(
                f"recall-{stage_name(seq_len)}-{number}",
                f"Recall by depth: {task} at {stage_name(context)}, stage {stage_name(seq_len)}",
                chart(task, Axis("Depth"), Axis("Accuracy", low=0.0, high=1.0), lines),
                _THIN.strip() * any(line.thin for line in lines),
            )


def _with_mean(seeds: Sequence[Points], arm: Arm, colours: Mapping[str, int]) -> Iterator[Line]:
    """A thin line for each of several seeds, and their mean, at the places that all have."""
    if not seeds:
        return
    if len(seeds) > 1:
        yield from (Line(points, "", colours[arm.name], thin=True) for points in seeds)
    shared = [x for x, _ in seeds[0] if all(x in dict(points) for points in seeds)]
    mean = tuple((x, math.fsum(dict(points)[x] for points in seeds) / len(seeds)) for x in shared)
    yield Line(mean, arm.name, colours[arm.name], marked=True)


def _positions(result: Result | None) -> Points:
    return tuple((float(bucket.stop), bucket.perplexity) for bucket in result.by_position) if result is not None else ()


def _has_positions(result: Result) -> bool:
    return bool(result.by_position)


def _settled(points: Points) -> list[float]:
    return [y for _, y in points[math.ceil(_AFTER * len(points)) :]] or [y for _, y in points]


def file_name(figure: Figure) -> str:
    """Of its drawing, beside the page."""
    return str(PurePath("figures") / f"{figure.name}.svg")
