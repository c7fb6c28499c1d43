"""The check for GPUs in its small form, on whatever is here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch


def test_small_form(script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["gqa", "kvpath_concat", "mla"]
    code = script["main"](["--small", "--output", str(tmp_path / "out.json"), "--layouts", *names])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == report
    assert (code, report["wrong"]) == (0, [])
    for kind in ("numbers {}", "kernels {}", "train {} 16", "train {} 32", "decode {} 64"):
        assert {kind.format(name) for name in names} <= set(report["cells"])
    for name, found in report["cells"].items():
        if name.startswith("train") and not {"unfinished", "skipped"} & set(found):
            assert found["tokens_per_s"] > 0
            assert found["mfu"] > 0


def test_a_cell_that_takes_too_long_is_named(script: dict[str, Any]) -> None:
    cell = script["Cell"]

    def endless() -> dict[str, Any]:
        while True:
            pass

    def too_large() -> dict[str, Any]:
        raise torch.OutOfMemoryError("there is not so much")

    def wrong() -> dict[str, Any]:
        raise ValueError("a fault")

    cells = [cell("wrong", 1.0, wrong), cell("large", 1.0, too_large), cell("endless", 1.0, endless)]
    found = script["run"]([*cells, cell("late", 9.0, dict)], 1.9)
    assert "more than 1 s" in found["endless"]["unfinished"]
    assert found["wrong"]["right"] is False
    assert found["large"]["unfinished"] == "there is not so much"
    assert found["late"]["unfinished"] == "the budget was spent"


def test_without_a_gpu_it_says_so(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script["main"]([]) == 1
    assert "no GPU is here" in capsys.readouterr().err
