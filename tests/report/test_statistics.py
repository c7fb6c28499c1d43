"""Tests over seeds, against Student's distribution as published and as scipy has it."""

import math

import pytest

from kvpath.report.statistics import critical, detectable_shift, mean_and_deviation, paired, upper_tail

TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 9: 2.2622, 30: 2.0423, 120: 1.9799}
"""Two-sided 5% points, as every table of Student's distribution has them."""


@pytest.mark.parametrize(("df", "t"), TABLE.items())
def test_critical_values_are_those_of_the_tables(df: int, t: float) -> None:
    assert critical(df) == pytest.approx(t, abs=6e-5)


def test_one_degree_of_freedom_is_cauchy_also_far_out() -> None:
    for t in (0.5, 10.0, 1e6):
        assert upper_tail(t, 1) == pytest.approx(math.atan2(1, t) / math.pi, rel=1e-10)


def test_sample_size_of_a_half_deviation_is_the_well_known_34() -> None:
    # A paired test, two-sided at 5%, of an effect of 0.5 has a power of 80% from 34 pairs on.
    assert detectable_shift(33) / math.sqrt(34) < 0.5 < detectable_shift(32) / math.sqrt(33)


def test_distribution_is_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    for df in (1, 2, 4, 9, 60):
        assert critical(df) == pytest.approx(stats.t.isf(0.025, df), rel=1e-9)
        for t in (0.0, 1.0, 4.0):
            assert upper_tail(t, df) == pytest.approx(stats.t.sf(t, df), rel=1e-10)
            for shift in (-1.0, 2.8, 6.0):
                assert upper_tail(t, df, shift) == pytest.approx(stats.nct.sf(t, df, shift), abs=1e-8)


def test_paired_test_of_an_example_worked_out() -> None:
    # Differences 1, 2, 3: mean 2, deviation 1, t = 2 / (1 / sqrt(3)) = 3.4641 with 2 degrees of freedom.
    found = paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (found.pairs, found.mean, found.deviation) == (3, 2.0, 1.0)
    # With 2 degrees of freedom the tail is 1/2 - t / (2 sqrt(2 + t^2)).
    t = 2 * math.sqrt(3)
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-9)
    assert found.smallest == pytest.approx(5.653489 / math.sqrt(3), rel=1e-6)  # noncentrality by scipy


def test_one_seed_says_nothing() -> None:
    found = paired([2.0], [1.0])
    assert (found.mean, found.deviation, found.p, found.smallest) == (1.0, None, None, None)
    assert mean_and_deviation([3.0]) == (3.0, None)


def test_equal_differences_give_no_test() -> None:
    assert paired([2.0, 3.0], [1.0, 2.0]).p is None
    assert paired([0.3, 0.4, 0.7], [0.1, 0.2, 0.5]).p is None  # apart by rounding alone


def test_pairs_must_be_pairs() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        paired([], [])
