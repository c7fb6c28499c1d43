import pytest
import torch
from torch import Tensor

from kvpath.attention import KVPathResidual
from kvpath.attention.per_head import PerHeadLinear
from kvpath.errors import UserError
from kvpath.model import BackboneConfig
from tests.attention.reference import Attention, Weight, assert_equal_to_equations, attention, heads, rms_norm, rope
from tests.cases import CASES, Case
from tests.paper import parameters_and_stored


def equations(config: BackboneConfig) -> Attention:
    """The states are built up layer by layer before rotation; query and key are rotated over their full width."""
    residual = config.attention
    assert isinstance(residual, KVPathResidual)
    n_kv_heads = residual.n_kv_heads
    state: dict[str, Tensor] = {}

    def expand(u_GDd: Tensor, delta_TGd: Tensor) -> Tensor:
        return torch.stack([delta_TGd[:, g] @ u_GDd[g].T for g in range(n_kv_heads)], dim=1)

    def attend(layer: int, x: Tensor, w: Weight) -> Tensor:
        h = rms_norm(x, w("norm"))
        if layer % residual.path_length == 0:
            both = heads(h @ w("w_alpha").T, 2 * n_kv_heads)
            state["k"], state["v"] = both[:, :n_kv_heads], both[:, n_kv_heads:]
        else:
            both = heads(h @ w("w_delta").T, 2 * n_kv_heads)
            state["k"] = state["k"] + expand(w("u_k"), both[:, :n_kv_heads])
            state["v"] = state["v"] + expand(w("u_v"), both[:, n_kv_heads:])
        q = rope(heads(h @ w("w_q").T, residual.n_heads))
        return attention(q, rope(state["k"]), state["v"]) @ w("w_o").T

    return attend


@pytest.mark.parametrize("case", [case for case in CASES if isinstance(case.attention, KVPathResidual)], ids=str)
def test_equals_the_equations(case: Case) -> None:
    assert_equal_to_equations(case, equations)


def test_size_in_the_paper() -> None:
    residual = KVPathResidual(n_heads=8, n_kv_heads=4, head_dim=160, delta_dim=32, path_length=4)
    assert parameters_and_stored(residual, d_ff=1516) == (98_710_016, 6_144)


def path(n_layers: int = 5, n_kv_heads: int = 4, head_dim: int = 6, delta_dim: int = 3, path_length: int = 3) -> Case:
    residual = KVPathResidual(
        n_heads=8, n_kv_heads=n_kv_heads, head_dim=head_dim, delta_dim=delta_dim, path_length=path_length
    )
    return Case("path", residual, n_layers)


def test_only_alphas_and_deltas_are_stored() -> None:
    stored = {(layer, name) for layer, name, _ in path().config().layout().cached()}
    alphas = {(layer, f"{name}_alpha") for layer in (0, 3) for name in "kv"}
    deltas = {(layer, f"{name}_delta") for layer in (1, 2, 4) for name in "kv"}
    assert stored == alphas | deltas


@pytest.mark.parametrize(("n_layers", "layers"), [(1, []), (2, []), (3, [1]), (4, [1]), (5, [1]), (6, [1, 4])])
def test_a_state_is_passed_on_only_where_a_layer_reads_it(n_layers: int, layers: list[int]) -> None:
    layout = path(n_layers).config().layout()
    passed_on = [(layer, name) for layer, name, slot in layout.slots() if not slot.cached]
    assert passed_on == [(layer, name) for layer in layers for name in "kv"]
    assert all(key in layout.last_readers for key in passed_on)


def test_expansions_draw_their_weights() -> None:
    with torch.device("meta"):
        expansion = PerHeadLinear(n_heads=5, n_in=30, n_out=40, init_std=0.02)
    expansion.to_empty(device="cpu")
    expansion.reset_parameters()
    assert expansion.weight.shape == (5, 40, 30)
    assert float(expansion.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert expansion.matmul_flops_per_token() == 2 * 5 * 40 * 30


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"delta_dim": 6}, "delta_dim must be between 1 and head_dim - 1 = 5, got 6"),
        ({"delta_dim": 0}, "delta_dim must be between 1 and head_dim - 1 = 5, got 0"),
        ({"head_dim": 7}, "head_dim is rotated in pairs, so it must be even and not negative, got 7"),
        ({"path_length": 0}, "path_length must be positive, got 0"),
        ({"n_kv_heads": 3}, "n_kv_heads must divide n_heads=8 .* got 3"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        path(**fields)
