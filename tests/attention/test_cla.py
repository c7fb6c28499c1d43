import pytest
from torch import Tensor

from kvpath.attention import CLA
from kvpath.errors import UserError
from kvpath.model import BackboneConfig
from tests.attention.reference import Attention, Weight, assert_equal_to_equations, attention, heads, rms_norm, rope
from tests.cases import CASES, Case
from tests.paper import parameters_and_stored


def equations(config: BackboneConfig) -> Attention:
    cla = config.attention
    assert isinstance(cla, CLA)
    keys_values: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(layer: int, x: Tensor, w: Weight) -> Tensor:
        h = rms_norm(x, w("norm"))
        owner = layer // cla.group_size * cla.group_size if cla.group_size else (cla.owners or [])[layer]
        if owner == layer:
            keys_values[layer] = rope(heads(h @ w("w_k").T, cla.n_kv_heads)), heads(h @ w("w_v").T, cla.n_kv_heads)
        return attention(rope(heads(h @ w("w_q").T, cla.n_heads)), *keys_values[owner]) @ w("w_o").T

    return attend


@pytest.mark.parametrize("case", [case for case in CASES if isinstance(case.attention, CLA)], ids=str)
def test_equals_the_equations(case: Case) -> None:
    assert_equal_to_equations(case, equations)


def test_size_in_the_paper() -> None:
    cla = CLA(n_heads=8, n_kv_heads=4, head_dim=256, group_size=4)
    assert parameters_and_stored(cla, d_ff=1024) == (98_710_016, 6_144)


def plan(owners: list[int] | None = None, group_size: int | None = None, n_layers: int = 5) -> Case:
    return Case("plan", CLA(n_heads=2, n_kv_heads=1, head_dim=6, owners=owners, group_size=group_size), n_layers)


def test_a_group_size_is_the_plan_it_stands_for() -> None:
    assert plan(group_size=2).config().layout() == plan([0, 0, 2, 2, 4]).config().layout()


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ([0, 2, 2], r"owners\[1\] = 2: .* in 0 to 1"),
        ([0, -1, 2], r"owners\[1\] = -1: .* in 0 to 1"),
        ([0, 0, 1], r"owners\[2\] = 1: layer 1 makes nothing to read, since owners\[1\] = 0"),
        ([1, 0], r"owners\[0\] = 1: .*owners\[1\] = 0: layer 0 makes nothing to read, since owners\[0\] = 1"),
    ],
    ids=["reader-before-owner", "negative", "chain", "cycle"],
)
def test_a_plan_that_does_not_work_is_refused(owners: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(owners)


@pytest.mark.parametrize("owners", [[0, 0], [0, 0, 0, 0], []])
def test_a_plan_of_another_length_than_the_model_is_refused(owners: list[int]) -> None:
    with pytest.raises(UserError, match=f"owners must have n_layers=3 entries, got {len(owners)}"):
        plan(owners, n_layers=3).config().layout()


@pytest.mark.parametrize(("owners", "group_size"), [(None, None), ([0, 0], 2)])
def test_one_of_group_size_and_owners_is_set(owners: list[int] | None, group_size: int | None) -> None:
    with pytest.raises(UserError, match=r"set group_size or owners, and not both, got group_size=.*, owners="):
        plan(owners, group_size)


def test_a_group_has_layers() -> None:
    with pytest.raises(UserError, match="group_size must be positive, got 0"):
        plan(group_size=0)
