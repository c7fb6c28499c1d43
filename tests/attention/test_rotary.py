import math

import pytest
import torch
from torch.testing import assert_close

from kvpath.attention.rotary import rotary_angles, rotate

BASE = 1e6


def test_pairs_and_frequencies_are_llamas() -> None:
    position, dim = 3, 6
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=torch.float64)
    rotated = rotate(x[None, None, None], rotary_angles(torch.tensor([[position]]), dim, BASE))[0, 0, 0]
    for i in range(dim // 2):
        angle = position / BASE ** (2 * i / dim)
        a, b = float(x[i]), float(x[i + dim // 2])
        assert float(rotated[i]) == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=1e-6)
        assert float(rotated[i + dim // 2]) == pytest.approx(a * math.sin(angle) + b * math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_transformers(dtype: torch.dtype) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=32, num_attention_heads=2, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": BASE}
    )
    positions = torch.tensor([[0, 1, 5, 1023, 99_999, 100_000]])
    x = torch.randn(2, 6, 2, 16, dtype=torch.float64)
    # Theirs rounds the angles to the model's dtype; given float64, they stay what they are.
    cos, sin = llama.LlamaRotaryEmbedding(config)(x, positions)
    expected, _ = llama.apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)
    found = rotate(x.to(dtype), rotary_angles(positions, 16, BASE))
    assert found.dtype == dtype
    assert_close(found.double(), expected.transpose(1, 2), atol=5 * torch.finfo(dtype).eps, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("position", [0, 1, 4_095, 4_097, 99_999, 100_000])
def test_the_first_pair_turns_by_the_position_itself(position: int) -> None:
    cos, sin = rotary_angles(torch.tensor([[position]]), 8, BASE)
    assert cos.dtype == sin.dtype == torch.float32
    assert float(cos[0, 0, 0, 0]) == pytest.approx(math.cos(position), abs=1e-7)
    assert float(sin[0, 0, 0, 0]) == pytest.approx(math.sin(position), abs=1e-7)


def test_every_position_to_100_000_has_angles_of_its_own() -> None:
    cos, sin = rotary_angles(torch.arange(100_001)[None], 64, BASE)
    slowest = torch.atan2(sin, cos)[0, :, 0, -1]
    assert (slowest.diff() > 0).all()


def test_angles_stay_in_float32_under_autocast() -> None:
    positions = torch.tensor([[100_000]])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rotary_angles(positions, 8, BASE)[0], rotary_angles(positions, 8, BASE)[0].float())
        cos, _ = rotary_angles(positions, 8, BASE)
    assert torch.equal(cos, rotary_angles(positions, 8, BASE)[0])


def test_bfloat16_is_rounded_once() -> None:
    x = torch.randn(1, 5, 1, 8).bfloat16()
    angles = rotary_angles(torch.arange(5)[None] + 100_000, 8, BASE)
    assert torch.equal(rotate(x, angles), rotate(x.float(), angles).bfloat16())


def test_products_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(query: int, key: int) -> float:
        turned = [rotate(x, rotary_angles(torch.tensor([[at]]), 8, BASE)) for x, at in ((q, query), (k, key))]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(1005, 1000), abs=1e-3)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)
