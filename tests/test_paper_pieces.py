"""The shipped pieces compose to the paper's models, to the parameter."""

import re

import pytest

from kvpath import pieces
from kvpath.analysis.audit import audit
from kvpath.analysis.matching import resolve_widths
from kvpath.config import load_config
from tests.paper import parameters_and_stored

MAIN = {
    "mha": (98_710_016, 12_288),
    "gqa": (98_710_016, 6_144),
    "mqa": (98_710_016, 1_536),
    "cla": (98_710_016, 6_144),
    "kvpath_concat": (98_710_016, 6_144),
    "kvpath_residual": (98_710_016, 6_144),
    "kvpath_rolling": (98_710_016, 6_144),
    "mla": (99_694_592, 1_920),
    "kvpath_mla": (99_694_592, 1_920),
}

ABLATIONS = {
    "g2": (100_282_880, 9_216),
    "g8": (98_185_728, 5_120),
    "g12": (97_661_440, 4_096),
    "ds16": (96_350_720, 4_608),
    "ds64": (103_428_608, 9_216),
}


def sizes(*names: str) -> tuple[int, int]:
    backbone = load_config("model/98m", *names).backbone
    assert (backbone.vocab_size, backbone.d_model, backbone.n_layers) == (50257, 512, 12)
    return parameters_and_stored(backbone.attention, backbone.d_ff_per_layer)


@pytest.mark.parametrize(("name", "expected"), MAIN.items())
def test_attention_piece(name: str, expected: tuple[int, int]) -> None:
    assert sizes(f"attention/{name}") == expected


@pytest.mark.parametrize(("name", "expected"), ABLATIONS.items())
def test_ablation_changes_concat_alone(name: str, expected: tuple[int, int]) -> None:
    assert sizes("attention/kvpath_concat", f"ablation/{name}") == expected


BILLION = {"gqa": 16_384, "kvpath_concat": 16_384, "kvpath_residual": 16_384, "kvpath_rolling": 16_384, "mla": 4_608}
BILLION["kvpath_mla"] = BILLION["mla"]


@pytest.mark.parametrize(("name", "stored"), BILLION.items())
def test_a_billion_parameters_within_a_twentieth_of_a_percent(name: str, stored: int) -> None:
    backbone = resolve_widths(load_config("model/1b", f"attention/1b/{name}").backbone)
    found = audit(backbone, context=2048)
    assert 0.9995 <= found.parameters / 1_000_000_000 <= 1
    assert found.stored_elements_per_token == stored
    assert {width % 64 for width in backbone.d_ff_per_layer} == {0}


def test_the_pieces_of_a_billion_are_all_looked_at() -> None:
    assert {name for name in pieces.available() if "/1b/" in name} == {f"attention/1b/{name}" for name in BILLION}


def test_a_later_piece_replaces_strategy_and_widths() -> None:
    assert sizes("attention/kvpath_mla", "attention/gqa") == MAIN["gqa"]
    assert sizes("attention/gqa", "attention/kvpath_mla") == MAIN["kvpath_mla"]


OURS = [name for name in pieces.available() if name.startswith(("model/", "attention/", "ablation/"))]
OTHERS = [name for name in pieces.available() if name.startswith(("stage/", "data/", "logger/"))]


@pytest.mark.parametrize("name", OTHERS)
def test_every_value_of_a_piece_is_explained(name: str) -> None:
    first, *lines = pieces.shipped(name).read_text(encoding="utf-8").splitlines()
    assert re.match(r"# \w", first)
    bare = [line for line in lines if not re.search(r"(: \S.*)? # \w", line)]
    assert all(re.fullmatch(r" *\w+:( [\w.]+[A-Z]\w+| [A-Z]\w+)?", line) for line in bare), bare


@pytest.mark.parametrize("name", OURS)
def test_a_piece_says_what_it_is_and_explains_each_field(name: str) -> None:
    first, *lines = pieces.shipped(name).read_text(encoding="utf-8").splitlines()
    assert re.match(r"# \w", first)
    values = [line for line in lines if not re.fullmatch(r" *\w+:( [A-Z]\w+)?", line)]
    assert values
    assert all(re.fullmatch(r" +\w+: \S.* # \w.*", line) for line in values)


def test_every_attention_and_ablation_piece_is_counted() -> None:
    counted = {*(f"attention/{name}" for name in MAIN), *(f"ablation/{name}" for name in ABLATIONS)}
    counted |= {f"attention/1b/{name}" for name in BILLION}
    assert counted == {name for name in OURS if not name.startswith("model/")}
