"""What decoding holds beyond weights and cache."""

import pytest
import torch

from kvpath.analysis.step_memory import compact_bytes, step_bytes
from kvpath.attention import AttentionStrategy, native
from kvpath.model import BackboneConfig, Decoder
from kvpath.testing.allocation import live_tensor_bytes
from tests.analysis.models import ATTENTION
from tests.attention.test_compact import SCALED
from tests.cases import SHIPPED, Case

TILE = 2**18 * 4
"""Bytes of a tile in float32."""

shipped = pytest.mark.parametrize("case", SHIPPED, ids=str)


def on_meta(attention: AttentionStrategy, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    with torch.device("meta"):
        return Decoder(BackboneConfig(vocab_size=64, d_model=512, n_layers=4, d_ff=8, attention=attention)).to(dtype)


@pytest.mark.parametrize("case", [*SHIPPED, SCALED], ids=str)
def test_compact_bytes_are_those_that_live(case: Case) -> None:
    model = case.decoder()
    before = live_tensor_bytes()
    model.compact()
    assert live_tensor_bytes() - before == compact_bytes(model)
    assert (compact_bytes(model) > 0) == (case is SCALED)


@shipped
@pytest.mark.parametrize("compact", [False, True])
def test_the_meta_device_tells_what_a_run_holds(case: Case, compact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for compiled in (native, native.rows):
        monkeypatch.setattr(compiled, "library", lambda: None)
    real = case.decoder(torch.float32)
    assert step_bytes(case.decoder(torch.float32).to("meta"), 300, compact=compact) == step_bytes(
        real, 300, compact=compact
    )


@pytest.mark.parametrize("name", ["gqa", "cla"])
def test_plain_modules_that_copy_nothing_hold_the_same_at_any_context(name: str) -> None:
    model = on_meta(ATTENTION[name])
    assert step_bytes(model, 32_768, compact=False) == step_bytes(model, 1_024, compact=False) < 2**16


@pytest.mark.parametrize("name", ["concat", "rolling", "mla", "kvpath_mla"])
def test_compact_modules_hold_tiles_where_plain_ones_hold_copies(name: str) -> None:
    model = on_meta(ATTENTION[name])
    held, longer = step_bytes(model, 8_192), step_bytes(model, 16_384)
    assert held == longer < 3 * TILE
    assert step_bytes(model, 16_384, compact=False) > 1.9 * step_bytes(model, 8_192, compact=False) > 4 * longer


def test_residual_adds_one_table_of_angles() -> None:
    model = on_meta(ATTENTION["residual"])
    per_token = (step_bytes(model, 16_384) - step_bytes(model, 8_192)) / 8_192
    assert per_token <= 3 * 80 * 4
    assert step_bytes(model, 8_192) < 3 * TILE + 8_192 * per_token
    assert step_bytes(model, 8_192) < step_bytes(model, 8_192, compact=False) / 8
