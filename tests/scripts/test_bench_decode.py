"""The benchmark of decoding in its small form: what it says, never how fast it was."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

TOKENS = {"1K x 1": (16, 1), "8K x 1": (128, 1), "32K x 1": (512, 1), "1K x 8": (16, 8), "8K x 8": (128, 8)}
PREFILLS = {"prefill 1K": (16, 16), "prefill 8K": (128, 128), "1K after 31K": (512, 16)}


def test_small_form(script: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pieces = ["attention/gqa", "attention/kvpath_residual,ablation/g2"]
    flags = [flag for piece in pieces for flag in ("-c", piece)]
    code = script["main"](
        ["--small", "--precision", "fp32", *flags, "--also", "plain", "--memory", "8MB", "--draw", str(tmp_path)]
    )
    output = capsys.readouterr().out
    result = json.loads(output.splitlines()[-1])
    assert code == 0
    assert result["outputs_equal"] is True
    assert result["not_reached"] == []
    assert (result["rounds"], len(result["busy_cores"])) == (1, 1)
    assert min(result["bytes_per_s"], result["flops_per_s"]) > 0
    names = [f"{piece} {kind}" for piece in pieces for kind in ("ours", "plain")]
    names[2:2] = ["attention/gqa hf dynamic", "attention/gqa hf static"]
    assert list(result["differences"]) == names
    assert 0 < max(result["differences"].values()) < 1e-4

    found = {(row["arm"], row["cell"]): row for row in result["cells"]}
    assert len(found) == len(result["cells"]) == len(names) * 10
    for (arm, cell), row in found.items():
        assert arm in output
        assert cell in output
        assert (row["seconds"] > 0, row["timed"] >= 1, row["bound_seconds"] > 0) == (True, True, True)
        assert (row["aim"] is not None) == arm.endswith("ours")
        assert row["filled"] == (cell in ("8MB of 8K", "8MB of 32K"))
        assert len(row["costs"]) == 5
        if cell in TOKENS:
            assert (row["context"], row["batch"], row["new"]) == (*TOKENS[cell], 1)
        if cell in PREFILLS:
            assert (row["context"], row["new"], row["batch"]) == (*PREFILLS[cell], 1)
    assert set(result["hf_best"].values()) <= {"attention/gqa hf dynamic", "attention/gqa hf static"}
    assert len(result["hf_best"]) == 10
    gqa, residual = (found[f"{piece} ours", "8K x 1"]["cache_bytes"] for piece in pieces)
    assert (gqa, residual) == (2 * 512 * 4 * 256 + 8 * 256, 1536 * 4 * 256 + 8 * 256)
    rows = [found[f"{piece} ours", "8MB of 8K"]["fitting"] for piece in pieces]
    assert rows == [14, 8]
    for picture in ("latency.png", "memory.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_outputs_that_differ_are_an_error(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs_of = script["outputs_of"]
    monkeypatch.setitem(script["main"].__globals__, "outputs_of", lambda *given: outputs_of(*given) * 1.001)
    assert script["main"](["--small", "--precision", "fp32", "--hf", "none", "-c", "attention/mqa"]) == 1
    output = capsys.readouterr().out
    assert "outputs are NOT EQUAL" in output
    assert json.loads(output.splitlines()[-1])["outputs_equal"] is False


def test_a_cell_that_takes_too_long_is_named(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    time_cell = script["time_cell"]

    def slow(subject: Any, cell: Any, *others: Any) -> Any:
        if cell.name == "8K x 1":
            raise script["OutOfTime"]
        return time_cell(subject, cell, *others)

    monkeypatch.setitem(script["main"].__globals__, "time_cell", slow)
    code = script["main"](["--small", "--precision", "fp32", "--hf", "none", "-c", "attention/mqa"])
    output = capsys.readouterr().out
    assert code == 0
    assert json.loads(output.splitlines()[-1])["not_reached"] == ["attention/mqa ours: 8K x 1"]
    assert "attention/mqa ours: 8K x 1 has no figure: over 90 s" in output


def test_long_passes_have_one_turn(script: dict[str, Any]) -> None:
    args, found, done = script["parse"](["--once", "4"]), script["Found"], script["done"]
    assert not done([], args)
    assert not done([found("a", seconds=[1.0, 3.0])], args)
    assert done([found("a", seconds=[1.0, 5.0])], args)
    assert done([found("a", note="over 90 s")], args)
    assert done([found("a", seconds=[1.0], fitting=3)], args)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-c", "attention/gq"], "error: no file and no shipped piece is called"),
        (["--memory", "much", "-c", "attention/mqa", "--hf", "none"], "error: --memory must be a number of bytes"),
    ],
)
def test_a_wrong_argument_is_one_line(
    script: dict[str, Any], capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert script["main"](["--small", *flags]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)


@pytest.mark.slow
def test_arms_in_processes_of_their_own(script: dict[str, Any]) -> None:
    args = script["parse"](["--seconds", "0", "--precision", "fp32", "-c", "attention/gqa"])
    (found,) = script["measure_apart"](script["Arm"]("machine"), args)
    assert found.machine.bytes_per_s > 0
