import pytest
import torch
from torch import Tensor

from kvpath.attention import MLA
from kvpath.errors import UserError
from kvpath.model import BackboneConfig
from tests.attention.reference import (
    Attention,
    Weight,
    assert_equal_to_equations,
    attention,
    heads,
    rms_norm,
    rope,
)
from tests.cases import CASES, Case
from tests.paper import parameters_and_stored


def equations(config: BackboneConfig) -> Attention:
    mla = config.attention
    assert isinstance(mla, MLA)

    def attend(layer: int, x: Tensor, w: Weight) -> Tensor:
        h = rms_norm(x, w("norm"))
        if mla.q_latent_dim is None:
            q = h @ w("w_q").T
        else:
            q = rms_norm(h @ w("w_q.0").T, w("w_q.1")) @ w("w_q.2").T
        q = heads(q, mla.n_heads)
        latent = rms_norm(h @ w("w_down").T, w("latent_norm"))
        both = heads(latent @ w("w_up").T, 2 * mla.n_heads)
        k, v = both[:, : mla.n_heads], both[:, mla.n_heads :]
        if mla.rotary_dim:
            shared = rope((h @ w("w_rotary").T)[:, None])
            k = torch.cat((k, shared.expand(-1, mla.n_heads, -1)), dim=-1)
            q = torch.cat((q[..., : mla.head_dim], rope(q[..., mla.head_dim :])), dim=-1)
        return attention(q, k, v) @ w("w_o").T

    return attend


@pytest.mark.parametrize("case", [case for case in CASES if type(case.attention) is MLA], ids=str)
def test_equals_the_equations(case: Case) -> None:
    assert_equal_to_equations(case, equations)


def test_size_in_the_paper() -> None:
    mla = MLA(n_heads=8, head_dim=64, latent_dim=128, rotary_dim=32)
    assert parameters_and_stored(mla, d_ff=2048) == (99_694_592, 1_920)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rotary_dim": 3}, "rotary_dim is rotated in pairs, so it must be even and not negative, got 3"),
        ({"latent_dim": 0}, "latent_dim must be positive, got 0"),
        ({"head_dim": -1}, "head_dim must be positive, got -1"),
        ({"q_latent_dim": 0}, "q_latent_dim must be positive, got 0"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        MLA(**{"n_heads": 8, "head_dim": 64, "latent_dim": 128, **fields})
