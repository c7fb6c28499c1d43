"""A run that goes on as something else than it was saved by: another stage, more or fewer ranks, with or without ZeRO.

No sum is made in the same order there, so it is equal to the unbroken run within rounding.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpath.training import saving
from kvpath.training.stored_config import read_checkpoint
from tests.training import zero_ranks
from tests.training.zero_ranks import STEPS, Plan, on_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

SAVED = [
    Plan("gqa-some", "ddp", what="save"),
    Plan("gqa-some", "zero2", tied=True, what="save"),
    Plan("concat-some", "zero3", what="save"),
    Plan("concat-some", "zero3+offload", tied=True, what="save"),
    Plan("gqa-some", "zero1", precision="bf16-mixed", what="save"),
]
GOES_ON = [
    *[
        (plan, kind)
        for plan in SAVED[:2]
        for kind in ("ddp", "zero1", "zero2", "zero2+offload", "zero3", "zero3+offload")
    ],
    *[(plan, kind) for plan in SAVED[2:4] for kind in ("ddp", "zero1", "zero2+offload", "zero3")],
]
GOES_ON += [(SAVED[4], kind) for kind in ("ddp", "zero2", "zero3")]
HALFWAY = 4
"""The step of the checkpoints that are gone on from."""


def moved(plan: Plan, kind: str, out: Path) -> Plan:
    """That which goes on."""
    return replace(plan, strategy=kind, checkpoint=str(out / str(plan) / "previous.ckpt"))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moved")


@pytest.fixture(scope="module")
def saved(corpus: Path, out: Path) -> dict[str, Any]:
    """What two ranks report that train to the end."""
    return on_ranks(SAVED, corpus, out)


def assert_goes_on(plan: Plan, report: dict[str, Any], unbroken: dict[str, Any]) -> None:
    bounds = {"losses": 2**-10, "gradient_norms": 2**-6, "validation": 2**-10}  # in bfloat16, as without a resume
    assert len(report["losses"]) == STEPS - HALFWAY
    for name in ("losses", "gradient_norms", "validation"):
        bound = 1e-5 if plan.precision == "32-true" else bounds[name]
        assert report[name] == pytest.approx(unbroken[name][-len(report[name]) :], rel=bound), name
    assert report["hash"] == unbroken["hash"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_run_goes_on_with_another_strategy_and_number_of_ranks(
    ranks: int, saved: dict[str, Any], out: Path, corpus: Path, tmp_path: Path
) -> None:
    plans = [(plan, moved(plan, kind, out)) for plan, kind in GOES_ON if ranks == 2 or kind in ("zero2", "zero3")]
    reports = on_ranks([goes_on for _, goes_on in plans], corpus, tmp_path, ranks=ranks)
    for plan, goes_on in plans:
        assert_goes_on(plan, reports[str(goes_on)], saved[str(plan)])


@pytest.mark.parametrize("plan", SAVED, ids=str)
def test_a_run_goes_on_without_ranks(
    plan: Plan, saved: dict[str, Any], out: Path, corpus: Path, tmp_path: Path
) -> None:
    report = zero_ranks.run(moved(plan, "auto", out), corpus, tmp_path / "alone", ranks=1)
    assert_goes_on(plan, report, saved[str(plan)])
    assert (tmp_path / "alone" / "last.ckpt").is_file()


def test_what_was_forgotten_would_show(
    saved: dict[str, Any], out: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_moments(path: Path) -> dict[str, Any]:
        (states,) = (stored := read_checkpoint(path))["optimizer_states"]
        return {**stored, "optimizer_states": [{**states, "state": {}}]}

    monkeypatch.setattr(saving, "read_checkpoint", without_moments)
    plan = SAVED[1]
    report = zero_ranks.run(moved(plan, "auto", out), corpus, tmp_path / "alone", ranks=1)
    with pytest.raises(AssertionError, match="losses"):
        assert_goes_on(plan, report, saved[str(plan)])
