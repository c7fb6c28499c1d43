from dataclasses import FrozenInstanceError

import pytest

from kvpath.attention import Heads, LayerLayout, Layout, Read, Slot
from kvpath.errors import UserError
from tests.cases import CONTRACT, Case, every_case

HEADS = Heads(n_heads=4, qk_dim=6, v_dim=6, rotary_dim=6)


def layer(*reads: Read, heads: Heads = HEADS, **makes: Slot) -> LayerLayout:
    return LayerLayout(makes, reads, heads)


def contract_case(name: str) -> Case:
    return next(case for case in CONTRACT if case.name == name)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "layout: a model needs at least one layer"),
        ((layer(k=Slot(0, 6)),), r"layer 0 makes\['k'\]: heads and dim must be positive, got 0 x 6"),
        ((layer(k=Slot(2, 0)),), r"layer 0 makes\['k'\]: heads and dim must be positive, got 2 x 0"),
        ((layer(k=Slot(2, 6, window=0)),), r"layer 0 makes\['k'\]: window must be positive or None, got 0"),
        (
            (layer(k=Slot(2, 6, over="old")),),  # type: ignore[arg-type]
            r"layer 0 makes\['k'\]: over must be 'history' or 'new', got 'old'",
        ),
        ((layer(k=Slot(2, 6, over="new")),), r"layer 0 makes\['k'\]: a cached slot is a history, so over='new' needs"),
        (
            (layer(k=Slot(2, 6, window=3, cached=False)),),
            r"layer 0 makes\['k'\]: only a cached slot has a window, got window=3 with cached=False",
        ),
        (
            (layer(), layer(heads=Heads(0, 6, 6))),
            "layer 1: n_heads, qk_dim and v_dim must be positive, got .*n_heads=0",
        ),
        ((layer(heads=Heads(4, 6, 6, 3)),), "layer 0: rotary_dim must be even and at most qk_dim=6, got 3"),
        ((layer(heads=Heads(4, 6, 6, 8)),), "layer 0: rotary_dim must be even and at most qk_dim=6, got 8"),
        ((layer(Read(1, "k")), layer(k=Slot(1, 2))), r"layer 0 reads\['k'\] of layer 1: an owner must come before"),
        (
            (layer(Read(0, "k"), k=Slot(1, 2)),),
            r"layer 0 reads\['k'\] of layer 0: an owner must come before its reader",
        ),
        ((layer(Read(5, "k")),), r"layer 0 reads\['k'\] of layer 5: there is no layer 5; layers are 0 to 0"),
        ((layer(), layer(Read(-1, "k"))), r"layer 1 reads\['k'\] of layer -1: there is no layer -1"),
        ((layer(k=Slot(1, 2)), layer(Read(0, "q"))), r"layer 1 reads\['q'\] of layer 0: that layer makes k"),
        ((layer(), layer(Read(0, "q"))), r"layer 1 reads\['q'\] of layer 0: that layer makes nothing"),
        (
            (layer(k=Slot(1, 2)), layer(Read(0, "k", (1, 3)))),
            r"layer 1 reads\['k'\] of layer 0: columns must be a range within 0 to 2, got \(1, 3\)",
        ),
        ((layer(k=Slot(1, 2)), layer(Read(0, "k", (1, 1)))), r"columns must be a range within 0 to 2, got \(1, 1\)"),
        (
            (layer(x=Slot(1, 2)), layer(k=Slot(1, 2, formed_from=(0, "x")))),
            r"layer 1 makes\['k'\]: formed_from=\(0, 'x'\) is not among the layer's reads",
        ),
        (
            (layer(x=Slot(1, 2)), layer(Read(0, "x"), k=Slot(1, 2, formed_from=(0, "x")))),
            r"layer 1 makes\['k'\]: formed_from=\(0, 'x'\) must be a slot with over='new'",
        ),
    ],
)
def test_a_fault_names_its_layer_field_and_value(layers: tuple[LayerLayout, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Layout(layers)


def test_all_faults_are_told_together() -> None:
    with pytest.raises(UserError, match=r"layer 0 makes\['k'\].*; .*layer 1: rotary_dim.*; .*layer 1 reads\['v'\]"):
        Layout((layer(k=Slot(0, 1)), layer(Read(0, "v"), heads=Heads(1, 2, 2, 1))))


@every_case
def test_cannot_be_changed(case: Case) -> None:
    layout = case.config().layout()
    with pytest.raises(FrozenInstanceError):
        layout.layers = ()  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        layout.layers[0].heads = HEADS  # type: ignore[misc]
    assert layout == case.config().layout()


def test_last_readers() -> None:
    layout = Layout((layer(a=Slot(1, 2), b=Slot(1, 2)), layer(Read(0, "a"), c=Slot(1, 2)), layer(Read(0, "a"))))
    assert layout.last_readers == {(0, "a"): 2}
    assert [layout.readers(0, name) for name in "ab"] == [(1, 2), ()]
    assert contract_case("shared-upper").config().layout().last_readers == {(2, "k"): 4, (2, "v"): 4}
    assert contract_case("running-state").config().layout().last_readers == {
        **{(0, name): 1 for name in ("k", "v")},
        **{(1, name): 2 for name in ("k_state", "v_state")},
    }


def test_touched_are_the_columns_that_are_read() -> None:
    layout = Layout((layer(k=Slot(1, 6)), layer(Read(0, "k", (0, 2)), Read(0, "k", (3, 5)), d=Slot(1, 2))))
    assert layout.touched(0) == {(0, "k"): frozenset(range(6))}
    assert layout.touched(1) == {(0, "k"): frozenset({0, 1, 3, 4}), (1, "d"): frozenset({0, 1})}


def test_a_state_that_is_rebuilt_stands_for_all_that_its_maker_touched() -> None:
    touched = contract_case("running-state").config().layout().touched(2)
    assert {key: len(columns) for key, columns in touched.items()} == {
        (0, "k"): 6,
        (0, "v"): 6,
        (1, "delta"): 3,
        (2, "delta"): 3,
    }


def test_a_source_over_the_new_tokens_touches_nothing_stored() -> None:
    touched = contract_case("local-history-shared").config().layout().touched(2)
    assert set(touched) == {(1, "k"), (1, "v"), (2, "k_local"), (2, "v_local")}
