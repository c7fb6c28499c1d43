"""The check for GPUs in its small form, on whatever is here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kvpath import pieces

LAYOUTS = [name.split("/")[1] for name in pieces.directly_in("attention")]
SMALL = ("--small", "--budget", "3600")
LAYERS = 4
"""Of the small form."""

CELLS = [
    "peaks",
    *(f"{kind} {name}" for kind in ("numbers", "kernels") for name in LAYOUTS),
    *(f"train {name} {length}" for length in (16, 32) for name in ("hf", *LAYOUTS)),
    *(f"train {name} 64" for name in ("hf", "gqa", "kvpath_concat", "kvpath_mla")),
    *(f"train {name} 32 compiled" for name in ("gqa", "kvpath_concat")),
    *(f"decode {name} {context}" for context in (16, 32, 64) for name in ("hf", *LAYOUTS)),
]


def test_small_form(script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    code = script["main"]([*SMALL, "--output", str(tmp_path / "out.json")])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == report
    assert (code, report["wrong"], report["unfinished"]) == (0, [], [])
    assert (report["torch"], report["transformers"]) == (torch.__version__, transformers.__version__)
    assert sorted(report["cells"]) == sorted(CELLS)
    figures = {
        "peaks": {"flops_per_s", "bytes_per_s"},
        "numbers": {"alone", "cached", "ratio"},
        "kernels": {"passes"},
        "train": {"tokens_per_s", "flops_per_s", "mfu"},
        "decode": {"ms_per_token", "bytes_per_token", "of_bound"},
    }
    for cell, found in report["cells"].items():
        kind, *rest = cell.split()
        wanted = figures[kind]
        if kind in ("train", "decode") and "hf" not in rest:
            wanted = wanted | {"over_hf"}
        if "compiled" in rest:
            wanted = wanted | {"over_eager"}
            assert found["compiled_blocks"] == LAYERS
        assert {name for name in wanted if found.get(name, 0) > 0} == wanted, cell


def test_little_time_shows_a_little_of_everything(script: dict[str, Any]) -> None:
    names = [cell.name for cell in script["Check"](torch.device("cpu"), False, LAYOUTS).cells()]
    kinds = ("numbers {}", "kernels {}", "train {} 2048", "decode {} 8192")
    first = {kind.format(name) for kind in kinds for name in LAYOUTS} | {"peaks", "train hf 2048", "decode hf 8192"}
    assert set(names[: len(first)]) == first
    assert [name for name in names if name.endswith("32768")][0] == "train hf 32768"
    assert len(names) == len(set(names)) == len(CELLS)


@pytest.mark.parametrize(("name", "graphs"), [("gqa", 1), ("kvpath_concat", 2)])
def test_layers_that_are_alike_share_a_graph(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str], name: str, graphs: int
) -> None:
    with torch._dynamo.config.patch(recompile_limit=graphs):
        assert script["main"]([*SMALL, "--layouts", name, "--cells", "compiled"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["cells"].values()
    assert (found["graphs"], found["compiled_blocks"]) == (graphs, LAYERS)


def test_a_block_that_is_not_compiled_is_named(script: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        assert script["main"]([*SMALL, "--layouts", "kvpath_concat", "--cells", "compiled"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["wrong"] == ["train kvpath_concat 32 compiled"]
    assert "RecompileLimit" in report["cells"]["train kvpath_concat 32 compiled"]["said"]


def test_a_pass_without_a_kernel_is_named(script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fused = F.scaled_dot_product_attention

    def only_without_masks(*tensors: Any, attn_mask: Any, **options: Any) -> Any:
        if attn_mask is not None:
            raise RuntimeError("No available kernel. Aborting execution.")
        return fused(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", only_without_masks)
    found = script["Check"](torch.device("cpu"), True, LAYOUTS).kernels("gqa")
    assert found["without_kernel"] == ["training on packed documents", "prefill after a prefill"]
    assert not found["right"]


def test_a_plan_may_be_off_by_a_tenth(script: dict[str, Any]) -> None:
    assert script["compared"](92, 100)["right"]
    assert not script["compared"](112, 100)["right"]


def test_the_driver_is_told_by_its_tool(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert script["driver"]() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 580.1\n", encoding="utf-8")
    tool.chmod(0o755)
    assert script["driver"]() == "580.1"


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
    assert found["wrong"] == {"right": False, "said": "ValueError: a fault"}
    assert found["large"]["unfinished"] == "there is not so much"
    assert found["late"]["unfinished"] == "the budget was spent"


def test_without_a_gpu_it_says_so(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script["main"]([]) == 1
    assert "no GPU is here" in capsys.readouterr().err
