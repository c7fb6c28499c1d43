from dataclasses import replace

import pytest
import torch

from kvpath.analysis.sharing import Sharing
from kvpath.analysis.training_memory import Exchange
from kvpath.errors import UserError

P = 1_000
LARGEST = 300
PASSES = 7_000


def parts(sharing: Sharing, accumulation: int = 1, passes: int = PASSES) -> list[int]:
    """Weights, gradients, optimizer, buffers, activations."""
    memory = sharing.memory(P, LARGEST, passes, 1, accumulation, checkpointing=False)
    found = [memory.weights, memory.gradients, memory.optimizer, memory.buffers, memory.activations]
    assert memory.total == sum(found)
    return found


def test_one_process_makes_its_gradients_on_its_way() -> None:
    assert parts(Sharing()) == [4 * P, 4 * P, 8 * P, 0, 7_000 - 4 * P]


def test_gradients_that_are_there_already_come_on_top() -> None:
    assert parts(Sharing(), accumulation=2) == [4 * P, 4 * P, 8 * P, 0, 7_000]
    assert parts(Sharing(ranks=2)) == [4 * P, 4 * P, 8 * P, 0, 7_000]  # DDP's buckets


def test_ddp_makes_its_buckets_twice_while_no_pass_runs() -> None:
    assert parts(Sharing(ranks=2), passes=1_000) == [4 * P, 4 * P, 8 * P, 3_000, 1_000]
    assert parts(Sharing(), passes=5_000)[3] == 0


def test_lightning_s_own_ddp_keeps_what_is_accumulated_beside_its_buckets() -> None:
    assert not Sharing.of({"strategy": {"class_path": "kvpath.training.meeting.DDP"}}, 2).gradients_apart
    theirs = Sharing.of({"strategy": "ddp"}, 2)
    assert parts(theirs) == parts(Sharing(ranks=2))
    assert parts(theirs, accumulation=2)[1] == 8 * P


@pytest.mark.parametrize(
    ("stage", "gradients", "and_before", "weights"),
    [(1, P // 2, 2 * P, 2 * P), (2, P // 2, P // 2, 2 * P), (3, P // 2, 0, P // 2 + 2 * (100 + 200 + 2 * LARGEST))],
)
def test_zero_in_bf16_shares_out_more_with_each_stage(
    stage: int, gradients: int, and_before: int, weights: int
) -> None:
    sharing = Sharing(
        ranks=4, stage=stage, precision="bf16-mixed", bucket_elements=500, live_elements=100, ahead_elements=200
    )
    assert (sharing.weight_dtype, sharing.autocast) == (torch.bfloat16, None)
    found = parts(sharing)
    assert found[:3] == [weights, gradients, 12 * P // 4]
    assert parts(sharing, accumulation=2)[1] == gradients + and_before
    assert found[3] >= 500 * 2 * (1 if stage == 3 else 2)


def test_offloading_moves_state_to_the_host() -> None:
    sharing = Sharing(ranks=2, stage=3, precision="bf16-mixed", offload_optimizer=True, offload_parameters=True)
    memory = sharing.memory(P, LARGEST, PASSES, 1, 1, checkpointing=False)
    assert (memory.optimizer, memory.gradients) == (0, 0)
    assert memory.host == (16 + 2 + 2) * P // 2


def test_the_lower_stages_carry_one_gradient_at_a_time_to_the_host() -> None:
    sharing = Sharing(ranks=2, stage=2, precision="bf16-mixed", bucket_elements=10, offload_optimizer=True)
    memory = sharing.memory(P, LARGEST, PASSES, 1, 1, checkpointing=False)
    assert memory.buffers == 2 * (2 * 10 + LARGEST)
    assert memory.host == (16 + 2) * P // 2 + 2 * LARGEST
    assert sharing.memory(P, LARGEST, PASSES, 1, 2, checkpointing=False).host == memory.host + 2 * P // 2


def test_a_trainer_s_configuration_says_it_all() -> None:
    assert Sharing.of({"strategy": "auto", "precision": "bf16-mixed"}, 1) == Sharing(precision="bf16-mixed")
    strategy = {"class_path": "kvpath.training.deepspeed.strategy.ZeRO", "init_args": {"stage": 3, "config": None}}
    assert Sharing.of({"strategy": strategy, "precision": None}, 8) == Sharing(ranks=8, stage=3)


def test_deepspeed_s_own_configuration_goes_over_the_fields() -> None:
    zero = {
        "reduce_bucket_size": 1e6,
        "overlap_comm": None,
        "stage3_max_live_parameters": 7,
        "stage3_prefetch_bucket_size": 8,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "none"},
    }
    given = {"stage": 3, "bucket_elements": 5, "offload_parameters": True, "config": {"zero_optimization": zero}}
    found = Sharing.of({"strategy": {"class_path": "ZeRO", "init_args": given}}, 2)
    assert found == Sharing(
        ranks=2,
        stage=3,
        bucket_elements=1_000_000,
        overlap_comm=False,
        live_elements=7,
        ahead_elements=8,
        offload_optimizer=True,
    )


def test_every_mistake_is_named_at_once() -> None:
    zero = {"stage": 2, "reduce_bucket_size": 0, "stage3_prefetch_bucket_size": "many"}
    given = {"stage": 3, "offload_parameters": True, "config": {"zero_optimization": zero}}
    with pytest.raises(UserError) as caught:
        Sharing.of({"strategy": {"class_path": "ZeRO", "init_args": given}}, 2)
    for problem in ("reduce_bucket_size", "got many", "offload_parameters", "needs stage 3, got stage 2"):
        assert problem in str(caught.value)
    with pytest.raises(UserError, match="must be 1, 2 or 3, got 4"):
        Sharing(stage=4)


@pytest.mark.parametrize(("stage", "bytes_each"), [(0, 12), (1, 14), (2, 14), (3, 12)])
def test_checkpoints(stage: int, bytes_each: int) -> None:
    precision = "bf16-mixed" if stage else "32-true"
    assert Sharing(ranks=2, stage=stage, precision=precision).checkpoint_bytes(P) == bytes_each * P


def test_each_stage_holds_less_than_the_one_before() -> None:
    totals = [
        Sharing(16, stage, "bf16-mixed").memory(10**9, LARGEST, PASSES, 1, 2, checkpointing=False).total
        for stage in (1, 2, 3)
    ]
    assert (
        totals[2] < totals[1] < totals[0] < Sharing(16).memory(10**9, LARGEST, PASSES, 1, 2, checkpointing=False).total
    )


def test_gradients_of_stage_1_leave_on_the_way_only_if_they_are_exchanged_there() -> None:
    sharing = Sharing(ranks=4, stage=1, bucket_elements=500)
    assert sharing.exchange(P) == Exchange(500, P // 4, buckets=2)
    assert replace(sharing, overlap_comm=False).exchange(P) is None
    assert parts(replace(sharing, overlap_comm=False))[1] == 4 * P
    assert replace(sharing, offload_optimizer=True).exchange(P) == Exchange(500, 0, buckets=2)
