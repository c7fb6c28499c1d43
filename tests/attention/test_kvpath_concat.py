import pytest
import torch
from torch import Tensor

from kvpath.attention import KVPathConcat
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
    """KVPath, eqs. 4, 5 and 8."""
    concat = config.attention
    assert isinstance(concat, KVPathConcat)
    d_alpha = concat.head_dim - concat.delta_dim
    alphas: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(layer: int, x: Tensor, w: Weight) -> Tensor:
        h = rms_norm(x, w("norm"))
        path = layer // concat.path_length
        if layer % concat.path_length == 0:
            both = heads(h @ w("w_alpha").T, 2 * concat.n_kv_heads)
            alphas[path] = both[:, : concat.n_kv_heads], both[:, concat.n_kv_heads :]
        k_alpha, v_alpha = alphas[path]
        both = heads(h @ w("w_delta").T, 2 * concat.n_kv_heads)
        k_delta, v_delta = both[:, : concat.n_kv_heads], both[:, concat.n_kv_heads :]
        q = heads(h @ w("w_q").T, concat.n_heads)
        q = torch.cat((q[..., :d_alpha], rope(q[..., d_alpha:])), dim=-1)
        k = torch.cat((k_alpha, rope(k_delta)), dim=-1)
        v = torch.cat((v_alpha, v_delta), dim=-1)
        return attention(q, k, v) @ w("w_o").T

    return attend


@pytest.mark.parametrize("case", [case for case in CASES if isinstance(case.attention, KVPathConcat)], ids=str)
def test_equals_the_equations(case: Case) -> None:
    assert_equal_to_equations(case, equations)


def test_size_in_the_paper() -> None:
    concat = KVPathConcat(n_heads=8, n_kv_heads=4, head_dim=160, delta_dim=32, path_length=4)
    assert parameters_and_stored(concat, d_ff=1536) == (98_710_016, 6_144)


@pytest.mark.parametrize("path_length", [1, 2, 3, 7])
def test_paths_read_their_own_alpha(path_length: int) -> None:
    concat = KVPathConcat(n_heads=2, n_kv_heads=1, head_dim=6, delta_dim=2, path_length=path_length)
    owners = [{read.owner for read in concat.reads(layer)} for layer in range(7)]
    assert owners == [set() if layer % path_length == 0 else {layer // path_length * path_length} for layer in range(7)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"delta_dim": 160}, "delta_dim must be between 1 and head_dim - 1 = 159, got 160"),
        ({"delta_dim": 0}, "delta_dim must be between 1 and head_dim - 1 = 159, got 0"),
        ({"delta_dim": 31}, "delta_dim is rotated in pairs, so it must be even and not negative, got 31"),
        ({"path_length": 0}, "path_length must be positive, got 0"),
        ({"n_kv_heads": 3}, "n_kv_heads must divide n_heads=8 .* got 3"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, int], message: str) -> None:
    good = {"n_heads": 8, "n_kv_heads": 4, "head_dim": 160, "delta_dim": 32, "path_length": 4}
    with pytest.raises(UserError, match=message):
        KVPathConcat(**{**good, **fields})
