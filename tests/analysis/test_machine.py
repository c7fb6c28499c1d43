import time

import pytest
import torch

from kvpath.analysis.machine import Machine, OutOfTime, largest_costs, time_limit, time_steps


def test_rates_are_measured() -> None:
    found = Machine.measured(torch.float32, 0.0, small=True)
    assert min(found.bytes_per_s, found.flops_per_s) > 0


def test_steps_are_timed_after_one_that_is_not() -> None:
    calls: list[int] = []
    assert len(time_steps(lambda: calls.append(1), 0.0)) == 2
    assert len(calls) == 3


def test_the_largest_costs_of_a_step() -> None:
    left = torch.ones(64, 64)
    costs = largest_costs(lambda: (left @ left).sum(), 1, always="aten::sum")
    assert "aten::sum" in costs
    assert 1 <= len(costs) <= 2
    assert 0 < sum(costs.values()) <= 1


def test_what_takes_too_long_is_stopped() -> None:
    with pytest.raises(OutOfTime), time_limit(0.05):
        time.sleep(30)
    with time_limit(30):
        pass
    time.sleep(0.01)
