"""Losses over the tokens of a run, from its `metrics.jsonl`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpath.training.metrics_file import read_metrics

Points = tuple[tuple[float, float], ...]

SHOWN = 160
"""Points of a curve that a figure keeps."""


@dataclass(frozen=True)
class Curves:
    """Points of tokens and nats per token."""

    training: Points
    validation: Points
    last_step: int
    stream_hash: str | None
    """The last one written."""


def read_curves(path: Path, tokens_per_step: float) -> Curves:
    """Curves of a file; empty ones if it is not there. A line that a kill cut short is passed over."""
    training: list[tuple[float, float]] = []
    validation: list[tuple[float, float]] = []
    last_step, stream_hash = 0, None
    for line in read_metrics(path) if path.exists() else []:
        if not isinstance(line, dict) or not isinstance(step := line.get("step"), int):
            continue
        last_step = max(last_step, step)
        if isinstance(found := line.get("data/stream_hash"), str):
            stream_hash = found
        for name, points in (("train/loss", training), ("validation/loss", validation)):
            loss = _number(line.get(name))
            if loss is not None:
                points.append((step * tokens_per_step, loss))
    return Curves(tuple(training), tuple(validation), last_step, stream_hash)


def smoothed(points: Points, share: float = 0.02) -> Points:
    """The running mean over the last `share` of a curve's points, exponentially weighted, at up to SHOWN of them."""
    keep = 1 - 1 / max(1.0, share * len(points))
    mean, weight, smooth = 0.0, 0.0, []
    for x, y in points:
        mean, weight = keep * mean + y, keep * weight + 1
        smooth.append((x, mean / weight))
    return thinned(smooth)


def thinned(points: Sequence[tuple[float, float]]) -> Points:
    """Up to SHOWN points, evenly apart, the last one among them."""
    if len(points) <= SHOWN:
        return tuple(points)
    step = (len(points) - 1) / (SHOWN - 1)
    return tuple(points[round(index * step)] for index in range(SHOWN))


def _number(value: Any) -> float | None:
    """A finite one."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None
