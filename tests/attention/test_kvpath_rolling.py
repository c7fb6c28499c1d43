import pytest
import torch
from torch import Tensor

from kvpath.attention import KVPathRolling, Read
from kvpath.attention.kvpath_rolling import by_halves, by_pairs
from kvpath.errors import UserError
from kvpath.model import BackboneConfig
from tests.attention.reference import Attention, Weight, assert_equal_to_equations, attention, heads, rms_norm, rope
from tests.cases import CASES, Case
from tests.paper import parameters_and_stored


def equations(config: BackboneConfig) -> Attention:
    """One state a path, before rotation, of which each later layer overwrites the next pairs (i, i + d/2) in turn."""
    rolling = config.attention
    assert isinstance(rolling, KVPathRolling)
    n_kv_heads, n_pairs, n_new = rolling.n_kv_heads, rolling.head_dim // 2, rolling.delta_dim // 2
    state: dict[str, Tensor] = {}

    def overwrite(old: Tensor, new: Tensor, step: int) -> Tensor:
        columns = list(old.unbind(-1))
        for i in range(n_new):
            pair = ((step - 1) * n_new + i) % n_pairs
            columns[pair], columns[pair + n_pairs] = new[..., i], new[..., i + n_new]
        return torch.stack(columns, dim=-1)

    def attend(layer: int, x: Tensor, w: Weight) -> Tensor:
        h = rms_norm(x, w("norm"))
        both = heads(h @ w("w_kv").T, 2 * n_kv_heads)
        step = layer % rolling.path_length
        for name, new in (("k", both[:, :n_kv_heads]), ("v", both[:, n_kv_heads:])):
            state[name] = overwrite(state[name], new, step) if step else new
        q = rope(heads(h @ w("w_q").T, rolling.n_heads))
        return attention(q, rope(state["k"]), state["v"]) @ w("w_o").T

    return attend


@pytest.mark.parametrize("case", [case for case in CASES if isinstance(case.attention, KVPathRolling)], ids=str)
def test_equals_the_definition(case: Case) -> None:
    assert_equal_to_equations(case, equations)


def test_size_beside_the_paper() -> None:
    rolling = KVPathRolling(n_heads=8, n_kv_heads=4, head_dim=160, delta_dim=32, path_length=4)
    assert parameters_and_stored(rolling, d_ff=1536) == (98_710_016, 6_144)


def path(n_kv_heads: int = 4, head_dim: int = 10, delta_dim: int = 4, path_length: int = 7) -> Case:
    rolling = KVPathRolling(
        n_heads=8, n_kv_heads=n_kv_heads, head_dim=head_dim, delta_dim=delta_dim, path_length=path_length
    )
    return Case("path", rolling, n_layers=9)


def test_a_layer_reads_what_was_not_overwritten_since() -> None:
    layers = path().config().layout().layers
    assert layers[0].reads == layers[7].reads == ()
    assert layers[1].reads == (Read(0, "k_alpha", (4, 10)), Read(0, "v_alpha", (4, 10)))
    assert layers[4].reads == (
        *(Read(2, name, (2, 4)) for name in ("k_delta", "v_delta")),
        *(Read(3, name, (0, 4)) for name in ("k_delta", "v_delta")),
    )


@pytest.mark.parametrize("layer", range(9))
def test_every_layer_touches_the_width_of_one_state(layer: int) -> None:
    touched = path().config().layout().touched(layer)
    assert sum(len(columns) for columns in touched.values()) == 2 * 10


def test_features_by_pairs_and_back() -> None:
    x = torch.arange(6)
    assert by_pairs(x).tolist() == [0, 3, 1, 4, 2, 5]
    assert by_halves(by_pairs(x)).tolist() == x.tolist()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"delta_dim": 10}, "delta_dim must be between 1 and head_dim - 1 = 9, got 10"),
        ({"delta_dim": 0}, "delta_dim must be between 1 and head_dim - 1 = 9, got 0"),
        ({"delta_dim": 3}, "delta_dim is rotated in pairs, so it must be even and not negative, got 3"),
        ({"head_dim": 9}, "head_dim is rotated in pairs, so it must be even and not negative, got 9"),
        ({"path_length": 0}, "path_length must be positive, got 0"),
        ({"n_kv_heads": 3}, "n_kv_heads must divide n_heads=8 .* got 3"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        path(**fields)
