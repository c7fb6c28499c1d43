import pytest

from kvpath.errors import UserError
from kvpath.training import cadence
from kvpath.training.cadence import Cadence, Clock


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("500 steps", 500, "steps"),
        ("1 step", 1, "steps"),
        ("10M tokens", 10_000_000, "tokens"),
        ("1.5b tokens", 1_500_000_000, "tokens"),
        ("1,000 steps", 1000, "steps"),
        ("0.5 minutes", 0.5, "minutes"),
    ],
)
def test_parse(text: str, amount: float, unit: str) -> None:
    assert Cadence.parse(text, "every.log") == Cadence(amount, unit)


@pytest.mark.parametrize("text", ["", "5", "steps", "0 steps", "-3 steps", "5 hours", "5 batches", "1..2 steps"])
def test_parse_names_field_and_value(text: str) -> None:
    with pytest.raises(UserError, match=r"every\.log must be like '500 steps'.*got "):
        Cadence.parse(text, "every.log")


def test_tokens_become_steps_rounded_up() -> None:
    assert Cadence(1000, "tokens").in_steps(300) == 4
    assert Cadence(10, "tokens").in_steps(300) == 1
    assert Cadence(7, "steps").in_steps(300) == 7
    assert Cadence(7, "minutes").in_steps(300) is None


def test_clock_by_steps() -> None:
    clock = Clock(Cadence(3, "steps"), 64)
    assert [step for step in range(1, 10) if clock.due(step)] == [3, 6, 9]
    assert not clock.by_time


def test_clock_by_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 10.0, 59.0, 61.0, 61.5, 62.0, 120.0, 122.0, 122.5])
    monkeypatch.setattr(cadence.time, "monotonic", lambda: next(times))
    clock = Clock(Cadence(1, "minutes"), 64)
    # The clock is read once more whenever it is due.
    assert [clock.due(0) for _ in range(6)] == [False, False, True, False, False, True]
    assert clock.by_time
