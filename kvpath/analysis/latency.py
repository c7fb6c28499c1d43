"""What passes of a model took beside the least that they can take: as tables, and as pictures against the context."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvpath.analysis.tables import Cell, table
from kvpath.errors import UserError

Curves = Mapping[str, Sequence[tuple[int, float]]]
"""(context in tokens, value) of each thing compared, by its name."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One kind of pass of one thing that was timed."""

    arm: str
    """What was timed, such as `attention/gqa ours`."""

    cell: str
    """What it was timed at, such as `8K x 1`."""

    context: int
    """Tokens that the last one of the pass sees, itself included."""

    batch: int
    """Rows."""

    new: int = 1
    """Tokens of the pass in each row."""

    filled: bool = False
    """Whether the rows are as many as a stated memory holds."""

    fitting: int | None = None
    """How many it holds; more than `batch` if this machine has less."""

    seconds: float | None
    """The median of all passes; None if there is none."""

    timed: int = 0
    """How many passes."""

    bound_seconds: float
    """The least time that a pass can take."""

    aim: float | None = None
    """How many times its bound it may take; None for what we only compare with."""

    cache_bytes: int = 0
    note: str = ""
    """Why something is missing."""

    costs: Mapping[str, float] = field(default_factory=dict)
    """The largest shares of a pass's time, by operation."""

    @property
    def of_bound(self) -> float | None:
        """How many times its bound it took."""
        return None if self.seconds is None else self.seconds / self.bound_seconds

    @property
    def tokens_per_s(self) -> float | None:
        """New tokens, over all rows."""
        return None if self.seconds is None else self.batch * self.new / self.seconds

    @property
    def missed(self) -> bool:
        """Whether it took longer than it may."""
        return self.aim is not None and self.of_bound is not None and self.of_bound > self.aim

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        more = {name: getattr(self, name) for name in ("of_bound", "tokens_per_s", "missed")}
        return asdict(self) | more


def fastest(timings: Sequence[Timing]) -> dict[str, Timing]:
    """The fastest of some for each cell."""
    best: dict[str, Timing] = {}
    for timing in sorted((one for one in timings if one.seconds is not None), key=lambda one: one.seconds or 0.0):
        best.setdefault(timing.cell, timing)
    return best


def report(timings: Sequence[Timing], peers: Sequence[Timing] = ()) -> str:
    """Tables of all, and what is missing or missed, with the profile of each arm's worst cell.

    Args:
        timings: what was timed.
        peers: those of them of which the best counts.
    """
    best = fastest(peers)
    lines = ["milliseconds of a pass", _by_arm(timings, best, "seconds", 1e3, 1)]
    lines += ["", "times its bound", _by_arm(timings, best, "of_bound", 1.0, 2)]
    filled = [one for one in timings if one.filled and one.seconds is not None]
    if filled:
        columns = ("arm", "cell", "fitting", "batch", "tokens_per_s", "of_bound", "note")
        rows = [{name: _text(getattr(one, name), 1.0, 2) for name in columns} for one in filled]
        lines += ["", "as many rows as fit beside the weights", table(rows)]
    lines.append("")
    lines += [f"{one.arm}: {one.cell} has no figure: {one.note}" for one in timings if one.seconds is None]
    missed = [one for one in timings if one.missed]
    lines += [f"missed: {one.arm}, {one.cell}: {one.of_bound:.2f} x its bound, aim {one.aim:g}" for one in missed]
    for arm in dict.fromkeys(one.arm for one in missed):
        worst = max((one for one in missed if one.arm == arm), key=lambda one: one.of_bound or 0.0)
        costs = ", ".join(f"{name} {share:.1%}" for name, share in worst.costs.items())
        lines.append(f"profile of {arm}, {worst.cell}: {costs or 'a pass takes too long for one'}")
    return "\n".join(lines)


def draw(timings: Sequence[Timing], peers: Sequence[Timing], folder: Path) -> None:
    """Write latency.png and memory.png: a token of one row against its context.

    Args:
        timings: what is shown by its arm.
        peers: of which the best is shown as one.
        folder: where; made if it is not there.

    Raises:
        UserError: as `draw_against_context`.
    """
    best = [replace(one, arm="the best peer") for one in fastest(peers).values()]
    latency = _curves([*timings, *best], lambda one: 1e3 * (one.seconds or 0.0))
    memory = _curves(timings, lambda one: one.cache_bytes / 1e6)
    draw_against_context(latency, folder / "latency.png", "Decoding a token of one row", "ms")
    draw_against_context(memory, folder / "memory.png", "The cache of one row", "MB")


def draw_against_context(curves: Curves, file: Path, title: str, unit: str) -> None:
    """Draw curves over the context as a PNG, both axes logarithmic.

    Args:
        curves: what to draw.
        file: where to write the PNG.
        title: what is shown.
        unit: of the values.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
    except ImportError as error:
        raise UserError("drawing needs matplotlib: pip install 'kvpath[demo]'") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (name, points) in enumerate(curves.items()):
        contexts, values = zip(*sorted(points), strict=True)
        style: dict[str, Any] = {
            "marker": "osD^vPX*<>"[number % 10],
            "color": f"C{number % 10}",
            "markersize": 5,
            "linewidth": 1.4,
        }
        axes.plot(contexts, values, label=name, **style)
    ticks = sorted({context for points in curves.values() for context, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{context:,}" for context in ticks])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("context, tokens")
    axes.set_ylabel(unit)
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=110, format="png", pil_kwargs={"optimize": True})
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from error


def _points(timings: Sequence[Timing], value: Callable[[Timing], float]) -> list[tuple[int, float]]:
    shown = (one for one in timings if one.batch == one.new == 1 and not one.filled and one.seconds is not None)
    return [(one.context, value(one)) for one in shown]


def _curves(timings: Sequence[Timing], value: Callable[[Timing], float]) -> dict[str, list[tuple[int, float]]]:
    arms = dict.fromkeys(one.arm for one in timings)
    curves = {arm: _points([one for one in timings if one.arm == arm], value) for arm in arms}
    return {arm: points for arm, points in curves.items() if points}


def _by_arm(timings: Sequence[Timing], best: Mapping[str, Timing], name: str, factor: float, digits: int) -> str:
    """One value of each cell, a row for each arm and one for the best of the peers."""
    arms: dict[str, dict[str, Timing]] = {}
    for one in timings:
        arms.setdefault(one.arm, {})[one.cell] = one
    cells = list(dict.fromkeys(one.cell for one in timings if not one.filled))
    shown = [*arms.items(), *([("the best peer", best)] if best else [])]
    rows: list[dict[str, Cell]] = []
    for arm, of in shown:
        values = {cell: getattr(of[cell], name) if cell in of else None for cell in cells}
        rows.append({"arm": arm, **{cell: _text(value, factor, digits) for cell, value in values.items()}})
    return table(rows)


def _text(value: str | float | None, factor: float, digits: int) -> Cell:
    if isinstance(value, float):
        return f"{value * factor:,.{digits}f}"
    return "" if value is None else value
