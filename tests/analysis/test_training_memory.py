"""The passes on fake tensors hold what real ones do."""

from dataclasses import replace

import pytest
import torch

from kvpath.analysis.audit import count_parameters
from kvpath.analysis.live_bytes import LiveBytes
from kvpath.analysis.training_memory import Exchange, pass_bytes
from kvpath.attention import GQA
from kvpath.model import BackboneConfig, Decoder
from tests.cases import SHIPPED, Case

SCALARS = 64
"""Bytes: here and there a scalar is made by another operation."""

SEQUENCES, LENGTH, LONG = 3, 19, 411


def measured(model: Decoder, autocast: torch.dtype | None, length: int = LENGTH) -> list[int]:
    """Of the first micro-batch, and of one after it."""
    tokens_BT = torch.ones(SEQUENCES, length, dtype=torch.int64)
    peaks = []
    for _ in range(2):
        # as the Trainer's precision plugin has it
        passes = torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False)
        with LiveBytes() as live, passes:
            sums = model(tokens_BT, tokens_BT)  # which a training step holds on to
            (sums.total * 1.0).backward()
        peaks.append(live.peak)
        del sums
    return peaks


@pytest.mark.parametrize("case", SHIPPED, ids=str)
def test_both_passes_hold_what_they_are_said_to(case: Case) -> None:
    # in turn, so that each is tried with many layouts
    again = SHIPPED.index(case) % 2 == 1
    autocast = torch.bfloat16 if SHIPPED.index(case) % 3 == 1 else None
    model = case.decoder(torch.float32).train()
    model.activation_checkpointing = again
    told = [
        pass_bytes(
            model.config, SEQUENCES, LENGTH, autocast=autocast, activation_checkpointing=again, gradients_held=held
        )
        for held in (False, True)
    ]
    assert told == pytest.approx(measured(model, autocast), abs=SCALARS)


@pytest.mark.parametrize("case", SHIPPED[::3], ids=str)
def test_long_sequences_hold_activations_for_the_most_part(case: Case) -> None:
    again = SHIPPED.index(case) % 2 == 1
    model = case.decoder(torch.float32).train()
    model.activation_checkpointing = again
    told = pass_bytes(model.config, SEQUENCES, LONG, activation_checkpointing=again, gradients_held=True)
    assert told > 3 * 4 * count_parameters(model)
    assert told == pytest.approx(measured(model, None, LONG)[1], abs=SCALARS)


def test_weights_of_another_dtype() -> None:
    model = SHIPPED[0].decoder(torch.float64).train()
    told = pass_bytes(model.config, SEQUENCES, LENGTH, weights=torch.float64)
    assert told == pytest.approx(measured(model, None)[0], abs=SCALARS)
    assert torch.get_default_dtype() == torch.float32


def test_blocks_that_run_again_hold_less() -> None:
    config = BackboneConfig(
        vocab_size=64, d_model=64, n_layers=4, d_ff=256, attention=GQA(n_heads=2, n_kv_heads=1, head_dim=32)
    )

    def held(layers: int, again: bool) -> int:
        deep = replace(config, n_layers=layers)
        return pass_bytes(deep, 2, 512, activation_checkpointing=again, gradients_held=True)

    assert held(4, True) < held(4, False) / 2
    # One more block keeps its input alone: B T C elements.
    assert held(6, True) - held(4, True) == pytest.approx(2 * 2 * 512 * 64 * 4, rel=0.1)


@pytest.mark.parametrize("bucket", [1, 40_000, 10**9], ids=["each for itself", "some together", "all together"])
def test_gradients_that_leave_hold_a_part_from_the_first_full_bucket_on(bucket: int) -> None:
    config = BackboneConfig(
        vocab_size=64, d_model=64, n_layers=4, d_ff=256, attention=GQA(n_heads=2, n_kv_heads=1, head_dim=32)
    )
    kept = pass_bytes(config, 2, 8)
    without = pass_bytes(config, 2, 8, exchange=Exchange(bucket, 0, buckets=0))
    part = pass_bytes(config, 2, 8, exchange=Exchange(bucket, 10**6, buckets=0)) - 4 * 10**6
    assert without < 0.6 * kept
    if bucket == 10**9:
        assert part == without - 4 * 10**6  # made by no bucket
    else:
        assert without / 2 < part <= without


def test_buckets_are_made_when_logits_are_gone() -> None:
    config = BackboneConfig(
        vocab_size=4096, d_model=32, n_layers=2, d_ff=64, attention=GQA(n_heads=2, n_kv_heads=1, head_dim=16)
    )

    def held(bucket: int) -> int:
        return pass_bytes(config, 2, 64, exchange=Exchange(bucket, 0, buckets=2))

    logits = 4 * 2 * 64 * 4096
    assert held(1_000) == held(2_000)
    assert held(10**6 + 1_000) - held(10**6) == 2 * 4 * 1_000
    assert held(10**6) - held(1_000) < 2 * 4 * 10**6 - logits / 2
