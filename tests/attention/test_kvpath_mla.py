import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kvpath.attention import KVPathMLA
from kvpath.errors import UserError
from kvpath.inference import Cache
from kvpath.model import BackboneConfig
from tests.attention.reference import Attention, Weight, assert_equal_to_equations, attention, heads, rms_norm, rope
from tests.cases import CASES, Case, tokens
from tests.paper import parameters_and_stored


def equations(config: BackboneConfig) -> Attention:
    """The latent itself is shared, and normalised by each layer in its own way; deltas are shared by all heads."""
    mla = config.attention
    assert isinstance(mla, KVPathMLA)
    latents: dict[int, Tensor] = {}

    def beside(alpha_THD: Tensor, delta_TD: Tensor) -> Tensor:
        return torch.stack([torch.cat((alpha, delta_TD), dim=-1) for alpha in alpha_THD.unbind(1)], dim=1)

    def attend(layer: int, x: Tensor, w: Weight) -> Tensor:
        h = rms_norm(x, w("norm"))
        path = layer // mla.path_length
        if layer % mla.path_length == 0:
            latents[path] = h @ w("w_alpha").T
        up = heads(rms_norm(latents[path], w("gain")) @ w("w_up").T, 2 * mla.n_heads)
        delta = h @ w("w_delta").T
        k_delta, v_delta = delta[:, : mla.delta_dim], delta[:, mla.delta_dim :]
        k = beside(up[:, : mla.n_heads], rope(k_delta[:, None])[:, 0])
        v = beside(up[:, mla.n_heads :], v_delta)
        q = heads(h @ w("w_q").T, mla.n_heads)
        q = torch.cat((q[..., : mla.head_dim], rope(q[..., mla.head_dim :])), dim=-1)
        return attention(q, k, v) @ w("w_o").T

    return attend


@pytest.mark.parametrize("case", [case for case in CASES if isinstance(case.attention, KVPathMLA)], ids=str)
def test_equals_the_equations(case: Case) -> None:
    assert_equal_to_equations(case, equations)


def test_size_in_the_paper() -> None:
    mla = KVPathMLA(n_heads=8, head_dim=64, latent_dim=384, delta_dim=32, path_length=4)
    assert parameters_and_stored(mla, d_ff=[1792] * 10 + [1791] * 2) == (99_694_592, 1_920)


def path(head_dim: int = 5, latent_dim: int = 7, delta_dim: int = 4, path_length: int = 2) -> Case:
    mla = KVPathMLA(n_heads=3, head_dim=head_dim, latent_dim=latent_dim, delta_dim=delta_dim, path_length=path_length)
    return Case("path", mla)


@torch.no_grad()
def test_the_stored_latent_is_over_its_root_mean_square_and_has_no_gain() -> None:
    model = path().decoder()
    cache = Cache(model.layout, 2, dtype=torch.float64)
    model(tokens(2, 6), store=cache)
    mean_square = cache.entries(0, "alpha").values.square().mean(-1)
    assert_close(mean_square, torch.ones_like(mean_square), rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"delta_dim": 3}, "delta_dim is rotated in pairs, so it must be even and not negative, got 3"),
        ({"delta_dim": 0}, "delta_dim must be positive, got 0"),
        ({"latent_dim": 0}, "latent_dim must be positive, got 0"),
        ({"head_dim": -1}, "head_dim must be positive, got -1"),
        ({"path_length": 0}, "path_length must be positive, got 0"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        path(**fields)
