from dataclasses import replace

import pytest

from kvpath.cli import check
from kvpath.cli.main import main
from kvpath.errors import UserError
from kvpath.testing import ROUTES, Toy


def fast(name: str) -> list[object]:
    return [route for route in ROUTES if route.name in name]


def test_the_table_of_a_configuration(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ROUTES", fast("token by token, layers alone"))
    assert main(["check", "-c", "model/98m", "-c", "attention/kvpath_concat"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 models: KVPathConcat as configured, KVPathConcat-1, KVPathConcat-2, KVPathConcat-3"
    assert [line.split()[-1] for line in lines[2:5]] == ["verdict", "holds", "holds"]
    assert "more at the peak of a step" in lines[-1]


def test_a_route_that_fails_is_named_and_exits_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(toy: Toy) -> float:
        return 0.5 if toy.name == "GQA-2" else 0.0

    monkeypatch.setattr(check, "ROUTES", [replace(ROUTES[0], difference=off), ROUTES[1]])
    assert main(["check", "-c", "model/98m", "-c", "attention/gqa"]) == 1
    out = capsys.readouterr().out
    assert "5.0e-01    1e-10  FAILS for GQA-2" in out
    assert out.count("holds") == 1


def test_without_a_configuration_every_strategy_is_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "ROUTES", [])
    monkeypatch.setattr(check, "SLOW_ROUTES", fast("layers alone"))
    monkeypatch.setattr(check, "concrete_strategies", lambda: [type(toy.attention) for toy in two()])
    assert main(["check", "--slow"]) == 0
    assert capsys.readouterr().out.startswith("6 models: CLA-1, CLA-2, CLA-3, GQA-1, GQA-2, GQA-3\n")


def two() -> list[Toy]:
    from kvpath.attention import CLA, GQA
    from kvpath.testing import toys_of

    return [toys_of(CLA)[0], toys_of(GQA)[0]]


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="did you mean model.backbone.n_layers"):
        check.check_command(["-c", "model/98m", "-c", "attention/gqa", "--model.backbone.n_layer", "5"])
