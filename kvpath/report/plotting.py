"""One chart as SVG that stands by itself: lines and points over two axes, a legend below. No scripts, no fonts."""

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WIDTH, TOP, LEFT, RIGHT, PLOT = 480, 12, 58, 14, 236
"""In units of the drawing: a phone shows them a little smaller, a screen a little larger."""

_LETTER = 6.4
_COLOURS = 8


@dataclass(frozen=True)
class Line:
    """Points of one colour."""

    points: tuple[tuple[float, float], ...]
    label: str
    """In the legend, once for all lines of one label; "" for none."""

    colour: int
    spreads: tuple[float | None, ...] = ()
    """Half the height of a bar at each point."""

    joined: bool = True
    thin: bool = False
    """For one seed among several."""

    dashed: bool = False
    marked: bool = False
    """Whether points have markers, whose shapes follow the colour's number."""


@dataclass(frozen=True)
class Axis:
    """What one axis shows."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    """Where it ends; None for where the points do."""

    powers_of_two: bool = False


@dataclass(frozen=True)
class Figure:
    """A chart and what it is called."""

    name: str
    """Of its file."""

    title: str
    svg: str
    caption: str = ""


def chart(title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """The SVG of a chart; lines without points are left out.

    Raises:
        ValueError: there are no points.
    """
    lines = [line for line in lines if line.points]
    across = _Scale.of(x, [point[0] for line in lines for point in line.points], LEFT, WIDTH - RIGHT)
    values = [value for line in lines for value in _extent(line)]
    up = _Scale.of(y, values, TOP + PLOT, TOP)
    legend, legend_height = _legend(lines)
    height = TOP + PLOT + 44 + legend_height
    name = html.escape(title)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-label="{name}">',
        *_axes(x, y, across, up),
        f'<svg x="{LEFT - 6}" y="{TOP - 6}" width="{WIDTH - LEFT - RIGHT + 12}" height="{PLOT + 12}"'
        f' viewBox="{LEFT - 6} {TOP - 6} {WIDTH - LEFT - RIGHT + 12} {PLOT + 12}">',  # clips what lies outside
        *(part for line in sorted(lines, key=lambda line: not line.thin) for part in _line(line, across, up)),
        "</svg>",
        *legend,
        "</svg>",
    ]
    return "\n".join(parts)


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers within [low, high], at most `most` + 1 of them."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, twos: bool = False) -> list[float]:
    """Powers of two, or 1, 2 and 5 times powers of ten, thinned out until few are left; round numbers if none are."""
    if twos:
        exponents = list(range(math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9) + 1))
        return [2.0**exponent for exponent in exponents[:: max(1, -(-len(exponents) // 8))]]
    tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**ten for ten in tens for factor in factors if low <= factor * 10.0**ten <= high]
        if len(ticks) <= 8:
            break
    return ticks if len(ticks) >= 3 else nice_ticks(low, high)


@dataclass(frozen=True)
class _Scale:
    """From values to places."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    @classmethod
    def of(cls, axis: Axis, values: Sequence[float], start: float, end: float) -> "_Scale":
        if not values:
            raise ValueError("there are no points")
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        if axis.log:
            room = (high / low) ** 0.04 if high > low else 1.5
            return cls(low / room, high * room, start, end, True)
        room = 0.05 * (high - low) if high > low else abs(high) * 0.1 or 1.0
        return cls(low if axis.low is not None else low - room, high + room, start, end, False)

    def at(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        place = math.log(max(value, 1e-300)) if self.log else value
        return round(self.start + (self.end - self.start) * (place - low) / (high - low), 1)


def _extent(line: Line) -> Iterator[float]:
    for index, (_, y) in enumerate(line.points):
        half = (line.spreads[index] or 0.0) if line.spreads else 0.0
        yield from (y - half, y + half)


def _axes(x: Axis, y: Axis, across: _Scale, up: _Scale) -> Iterator[str]:
    bottom = TOP + PLOT
    for value in _ticks(x, across):
        place, shown = across.at(value), _short(value, x, across.high)
        yield f'<line class="grid" x1="{place}" x2="{place}" y1="{TOP}" y2="{bottom}"/>'
        yield f'<text class="tick" x="{place}" y="{bottom + 15}" text-anchor="middle">{shown}</text>'
    for value in _ticks(y, up):
        place, shown = up.at(value), _short(value, y, up.high)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{place}" y2="{place}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{place + 4}" text-anchor="end">{shown}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text class="axis" x="{middle}" y="{bottom + 33}" text-anchor="middle">{html.escape(x.label)}</text>'
    across_y = TOP + PLOT / 2
    yield (
        f'<text class="axis" x="13" y="{across_y}" text-anchor="middle" transform="rotate(-90 13 {across_y})">'
        f"{html.escape(y.label)}</text>"
    )


def _ticks(axis: Axis, scale: _Scale) -> list[float]:
    if axis.log:
        return log_ticks(scale.low, scale.high, axis.powers_of_two)
    return nice_ticks(scale.low, scale.high)


def _short(value: float, axis: Axis, highest: float) -> str:
    """A tick in few letters; thousands as such where the axis has large ones."""
    if axis.powers_of_two:
        return f"{value / 1024:g}K" if value >= 1024 else f"{value:g}"
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size and highest >= 10_000:
            return f"{value / size:.4g}{letter}"
    return f"{value:.6g}"


def _line(line: Line, across: _Scale, up: _Scale) -> Iterator[str]:
    colour = f"k{line.colour % _COLOURS}"
    places = [(across.at(x), up.at(y)) for x, y in line.points]
    if line.joined and len(places) > 1:
        kinds = " ".join([colour, "line", *["thin"] * line.thin, *["dashed"] * line.dashed])
        yield f'<polyline class="{kinds}" points="{" ".join(f"{x},{y}" for x, y in places)}"/>'
    for index, (x, place) in enumerate(places):
        if line.spreads and (half := line.spreads[index]):
            value = line.points[index][1]
            low, high = up.at(value - half), up.at(value + half)
            yield f'<line class="{colour} line" x1="{x}" x2="{x}" y1="{low}" y2="{high}"/>'
        if line.marked:
            says = f"{line.label}: {line.points[index][0]:,.6g}, {line.points[index][1]:,.5g}"
            yield _marker(line.colour, x, place, says)


def _marker(number: int, x: float, y: float, says: str = "") -> str:
    """A shape that tells arms apart without colours."""
    shape = (number + number // _COLOURS) % 4
    corners = (
        [],
        [(-4, -4), (4, -4), (4, 4), (-4, 4)],
        [(0, -5.5), (5, 4), (-5, 4)],
        [(0, -6), (6, 0), (0, 6), (-6, 0)],
    )[shape]
    title = f"<title>{html.escape(says)}</title>" * bool(says)
    kind = f'class="k{number % _COLOURS} mark"'
    if not corners:
        return f'<circle {kind} cx="{x}" cy="{y}" r="4.5">{title}</circle>'
    return f'<polygon {kind} points="{" ".join(f"{x + dx:g},{y + dy:g}" for dx, dy in corners)}">{title}</polygon>'


def _legend(lines: Sequence[Line]) -> tuple[list[str], int]:
    """Its parts, and their height: labels side by side as far as they fit."""
    parts, x, y = [], float(LEFT), TOP + PLOT + 56
    first: dict[str, Line] = {}
    for line in lines:
        first.setdefault(line.label, line)
    first.pop("", None)
    for label, line in first.items():
        room = 24 + _LETTER * min(len(label), 60) + 16
        if x > LEFT and x + room > WIDTH:
            x, y = float(LEFT), y + 18
        colour = f"k{line.colour % _COLOURS}"
        if line.joined:
            dashed = " dashed" * line.dashed
            parts.append(f'<line class="{colour} line{dashed}" x1="{x}" x2="{x + 18}" y1="{y - 4}" y2="{y - 4}"/>')
        if line.marked:
            parts.append(_marker(line.colour, x + 9, y - 4))
        shown = label if len(label) <= 60 else label[:59] + "…"
        parts.append(f'<text class="legend" x="{x + 24}" y="{y}">{html.escape(shown)}</text>')
        x += room
    return parts, y - TOP - PLOT - 44 + 12 if parts else 0
