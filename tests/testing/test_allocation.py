"""Memory as it is, counted over all tensors of the process."""

from collections.abc import Callable

import pytest
import torch

from kvpath.analysis.audit import audit
from kvpath.analysis.live_bytes import LiveBytes
from kvpath.attention import AttentionStrategy
from kvpath.inference.cache import Cache
from kvpath.model import BackboneConfig, Decoder
from kvpath.testing.allocation import live_tensor_bytes
from tests.analysis.models import ATTENTION

TOKENS = 1024


def narrow(attention: AttentionStrategy) -> BackboneConfig:
    """The paper's attention at its own sizes, around which the model is as small as can be."""
    return BackboneConfig(vocab_size=11, d_model=8, n_layers=12, d_ff=3, attention=attention)


@pytest.mark.parametrize("name", ATTENTION)
@torch.no_grad()
def test_decoding_takes_the_bytes_that_the_audit_says(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    config = narrow(ATTENTION[name])
    model = Decoder(config).to(torch.bfloat16).eval()
    model.compact()
    prompt, step = torch.ones(1, 3, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64)
    model(prompt, store=Cache(model.layout, 1, dtype=torch.bfloat16))
    before = live_tensor_bytes()
    cache = Cache(model.layout, 1, TOKENS, dtype=torch.bfloat16)
    model(prompt, store=cache)
    model(step, store=cache)
    taken = live_tensor_bytes() - before
    stated = audit(config, context=TOKENS)
    assert taken == pytest.approx(stated.allocated_bytes_per_token * TOKENS, rel=0.01)
    assert taken == pytest.approx(stated.stored_bytes_per_token * TOKENS, rel=0.01)
    with LiveBytes() as live:
        model(step, store=cache)
    record_property("peak_bytes_of_a_step", live.peak)
    assert 0 < live.peak < taken


def test_live_bytes_count_each_storage_once() -> None:
    before = live_tensor_bytes()
    whole = torch.zeros(1000, dtype=torch.float32)
    views = [whole[:10], whole[500:].view(torch.int32)]
    assert live_tensor_bytes() - before == 4000
    del whole
    assert live_tensor_bytes() - before == 4000
    del views
    assert live_tensor_bytes() == before


def test_the_peak_is_of_what_lives_at_once() -> None:
    base = torch.zeros(100)
    with LiveBytes() as live:
        for _ in range(3):
            made = base + 1
            made = made[:50]
        del made
        _ = torch.cat((base, base))
    assert live.peak == 800
