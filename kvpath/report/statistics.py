"""Paired t tests over seeds, and the smallest difference that so many seeds could show.

All that is needed of Student's distribution, central or not, is its upper tail: with S the root of a chi-square over
its degrees of freedom, P((Z + shift) / S > t) is the mean over S of Phi(shift - t S).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

LEVEL = 0.05
"""Of the two-sided test."""

POWER = 0.8
"""How probable it shall be that the test shows the smallest difference."""

_POINTS = 1000


@dataclass(frozen=True)
class Paired:
    """Differences of pairs, and what can be said of their mean."""

    pairs: int
    """How many."""

    mean: float
    """Their mean, in the unit of the values."""

    deviation: float | None
    """Their standard deviation over pairs; None for fewer than two."""

    p: float | None
    """Two-sided, that the mean is this far from zero by chance; None where nothing can be said."""

    smallest: float | None
    """The mean that this many pairs, at this deviation, would show at the 5% level with 80% power."""


def paired(values: Sequence[float], reference: Sequence[float]) -> Paired:
    """The paired t test of `values` against `reference`, pair by pair.

    Raises:
        ValueError: there are no pairs, or the lengths differ.
    """
    differences = [value - other for value, other in zip(values, reference, strict=True)]
    if not differences:
        raise ValueError("there are no pairs")
    mean, deviation = mean_and_deviation(differences)
    if deviation is None or deviation <= 1e-12 * max(map(abs, (*values, *reference))):  # no more than rounding
        return Paired(len(differences), mean, deviation, None, None)
    error = deviation / math.sqrt(len(differences))
    df = len(differences) - 1
    p = min(1.0, 2 * upper_tail(abs(mean) / error, df))
    return Paired(len(differences), mean, deviation, p, detectable_shift(df) * error)


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and the standard deviation with n - 1; None for a single value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def upper_tail(t: float, df: int, shift: float = 0.0) -> float:
    """P(T > t) of Student's distribution with `df` degrees of freedom and noncentrality `shift`.

    The integral over log S is smooth and falls off on both sides, so equal steps give it to rounding.
    """
    low = -40 / df - 12 / math.sqrt(df) - math.log1p(abs(t))
    high = math.log1p(12 / math.sqrt(df))
    step = (high - low) / _POINTS
    scale = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    return step * math.fsum(
        _normal(shift - t * math.exp(u)) * math.exp(scale + df * u - df / 2 * math.exp(2 * u))
        for u in (low + index * step for index in range(_POINTS + 1))
    )


@lru_cache
def critical(df: int, level: float = LEVEL) -> float:
    """The t beyond which a two-sided test at `level` rejects."""
    return _root(lambda t: level / 2 - upper_tail(t, df))


@lru_cache
def detectable_shift(df: int, level: float = LEVEL, power: float = POWER) -> float:
    """The noncentrality, a mean in standard errors, that a two-sided t test shows with probability `power`."""
    t = critical(df, level)
    return _root(lambda shift: upper_tail(t, df, shift) + upper_tail(t, df, -shift) - power)


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def _root(rising: Callable[[float], float]) -> float:
    """Where a rising function crosses zero, above 0."""
    low, high = 0.0, 1.0
    while rising(high) < 0:
        low, high = high, 2 * high
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2
