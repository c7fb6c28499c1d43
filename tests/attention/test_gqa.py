import pytest
from torch import Tensor

from kvpath.attention import GQA
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
    sees,
)
from tests.attention.strategies import WindowedGQA
from tests.cases import CASES, Case
from tests.paper import parameters_and_stored


def equations(config: BackboneConfig) -> Attention:
    gqa = config.attention
    assert isinstance(gqa, GQA)

    def attend(layer: int, x: Tensor, w: Weight) -> Tensor:
        h = rms_norm(x, w("norm"))
        q = rope(heads(h @ w("w_q").T, gqa.n_heads))
        k = rope(heads(h @ w("w_k").T, gqa.n_kv_heads))
        v = heads(h @ w("w_v").T, gqa.n_kv_heads)
        window = gqa.window if isinstance(gqa, WindowedGQA) and layer % 2 == 0 else None
        return attention(q, k, v, lambda query, key: sees(query, key, window)) @ w("w_o").T

    return attend


@pytest.mark.parametrize("case", [case for case in CASES if type(case.attention) in (GQA, WindowedGQA)], ids=str)
def test_equals_the_equations(case: Case) -> None:
    assert_equal_to_equations(case, equations)


@pytest.mark.parametrize(
    ("n_kv_heads", "head_dim", "d_ff", "expected"),
    [
        pytest.param(4, 64, 2048, (98_710_016, 6_144), id="gqa"),
        pytest.param(8, 64, [1878] * 4 + [1877] * 8, (98_710_016, 12_288), id="mha"),
        pytest.param(1, 64, 2176, (98_710_016, 1_536), id="mqa"),
        pytest.param(1, 256, 1024, (98_710_016, 6_144), id="mqa-wide"),
    ],
)
def test_size_in_the_paper(n_kv_heads: int, head_dim: int, d_ff: int | list[int], expected: tuple[int, int]) -> None:
    attention = GQA(n_heads=8, n_kv_heads=n_kv_heads, head_dim=head_dim)
    assert parameters_and_stored(attention, d_ff) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_kv_heads": 3}, r"n_kv_heads must divide n_heads=8 \(one of \[1, 2, 4, 8\]\), got 3"),
        ({"n_kv_heads": 0}, "n_kv_heads must divide n_heads=8 .* got 0"),
        ({"n_heads": 0}, "n_heads must be positive, got 0"),
        ({"head_dim": 7}, "head_dim is rotated in pairs, so it must be even and not negative, got 7"),
        ({"n_kv_heads": 5, "head_dim": -2}, "n_kv_heads .*; head_dim .* got -2"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GQA(**{"n_heads": 8, "n_kv_heads": 4, "head_dim": 64, **fields})
