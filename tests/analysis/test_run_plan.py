from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvpath.analysis import run_plan
from kvpath.analysis.audit import audit
from kvpath.analysis.run_plan import Machine, StagePlan, Total, plan_stage
from kvpath.analysis.sharing import Sharing
from kvpath.analysis.training_memory import pass_bytes
from kvpath.attention import GQA
from kvpath.data import Budget
from kvpath.errors import UserError
from kvpath.model import BackboneConfig

CONFIG = BackboneConfig(
    vocab_size=64, d_model=32, n_layers=2, d_ff=64, attention=GQA(n_heads=2, n_kv_heads=1, head_dim=16)
)
BUDGET = Budget(tokens=64 * 24 * 100, global_batch_sequences=24)


@pytest.fixture(autouse=True, scope="module")
def found_once() -> Iterator[None]:
    """The same passes are asked for again and again; what they hold is for other tests."""
    found: dict[str, int] = {}

    def once(*arguments: Any, **options: Any) -> int:
        key = repr((arguments[1:], options))
        if key not in found:
            found[key] = pass_bytes(*arguments, **options)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_plan, "pass_bytes", once)
        yield


def planned(memory: float, nodes: int = 1, devices: int = 2, **machine: float) -> StagePlan:
    given = Machine(nodes, devices, int(memory), **machine)  # type: ignore[arg-type]
    return plan_stage("a", CONFIG, BUDGET, 64, Sharing(ranks=given.ranks), given)


def test_the_largest_micro_batch_that_fits_is_taken() -> None:
    most = planned(1e12).best
    assert (most.micro_batch, most.accumulation, most.checkpointing) == (12, 1, False)
    tight = planned(most.total - 1)
    assert tight.fits
    assert tight.best.micro_batch == 6
    assert tight.plan.accumulation == 2
    assert tight.best.total < most.total


def test_blocks_are_run_again_only_if_they_cannot_be_kept() -> None:
    kept, again = planned(1).options
    assert (kept.micro_batch, again.micro_batch) == (1, 1)
    between = planned((kept.total + again.total) // 2)
    assert between.fits
    assert between.best.checkpointing
    nothing = planned(again.total - 1)
    assert not nothing.fits
    assert nothing.best == again


def test_what_a_driver_takes_is_left_alone() -> None:
    kept, _ = planned(1).options
    assert planned(kept.total, reserve=1).best != kept
    assert planned(kept.total + 1, reserve=1).best == kept


def test_time_follows_from_a_peak_or_from_what_was_measured() -> None:
    assert planned(1e12).seconds is None
    flops = audit(CONFIG, 64).training_flops_per_token
    by_peak = planned(1e12, peak_flops=1e12, utilisation=0.5)
    assert by_peak.tokens_per_second
    assert by_peak.seconds
    assert by_peak.tokens_per_second == pytest.approx(2 * 0.5e12 / flops)
    assert by_peak.seconds == pytest.approx(64 * 24 * 100 / by_peak.tokens_per_second)
    assert by_peak.device_hours == pytest.approx(2 * by_peak.seconds / 3600)
    again = planned(planned(1).options[1].total, peak_flops=1e12, utilisation=0.5)
    assert again.best.checkpointing
    assert again.tokens_per_second == pytest.approx(by_peak.tokens_per_second * 3 / 4)
    assert planned(1e12, tokens_per_second=10.0, peak_flops=1e12).tokens_per_second == 20.0


def test_a_batch_that_does_not_divide_by_the_ranks_is_refused() -> None:
    with pytest.raises(UserError, match="global_batch_sequences 24 is not a multiple of world_size 10"):
        planned(1e12, nodes=5)


def test_every_impossible_machine_is_refused_at_once() -> None:
    with pytest.raises(UserError) as caught:
        Machine(nodes=0, devices=1, memory=10, reserve=10, utilisation=1.5, peak_flops=-1.0)
    for field in ("nodes", "reserve", "utilisation", "peak_flops"):
        assert field in str(caught.value)


def test_more_ranks_of_zero_hold_less() -> None:
    def total(nodes: int, stage: int) -> int:
        machine = Machine(nodes, 2, 10**12)
        sharing = Sharing(machine.ranks, stage, "bf16-mixed", bucket_elements=10)
        budget = replace(BUDGET, global_batch_sequences=12)
        return plan_stage("a", CONFIG, budget, 64, sharing, machine).options[0].total

    assert total(3, 2) < total(1, 2)
    assert total(3, 3) < total(1, 3)


def test_stages_add_up() -> None:
    timed, untimed = planned(1e12, tokens_per_second=10.0), planned(1e12)
    total = Total.of([timed, timed])
    assert total.tokens == 2 * timed.plan.tokens
    assert timed.seconds
    assert total.seconds == 2 * timed.seconds
    assert total.device_hours == pytest.approx(2 * 2 * timed.seconds / 3600)
    assert timed.disk == 4 * timed.checkpoint
    assert total.disk == 7 * timed.checkpoint
    assert Total.of([timed, untimed]).seconds is None
