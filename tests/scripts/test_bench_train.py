"""The benchmark of training in its small form: what it says, never how fast it was."""

import json
from typing import Any

import pytest

pytest.importorskip("transformers")


def test_small_form(script: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    code = script["main"](
        ["--small", "--precision", "fp32", "-c", "attention/gqa", "-c", "attention/kvpath_concat,ablation/g2"]
    )
    output = capsys.readouterr().out
    result = json.loads(output.splitlines()[-1])
    assert code == 0
    assert result["losses_equal"] is True
    assert (result["rounds"], result["length"], len(result["busy_cores"])) == (1, 32, 1)
    assert result["peak_flops_per_s"] > 0
    names = {
        "attention/gqa": ["ours", "hf", "ceiling"],
        "attention/kvpath_concat,ablation/g2": ["ours", "ceiling"],
    }
    rows = result["arms"]
    assert [row["arm"] for row in rows] == [f"{model} {kind}" for model, kinds in names.items() for kind in kinds]
    for row in rows:
        assert row["tokens_per_s"] > 0
        assert row["of_peak"] > 0
        assert row["arm"] in output
        trains = row["kind"] != "ceiling"
        assert (row["of_ceiling"] is not None, row["peak_rss_mb"] is not None) == (trains, trains)
        assert (row["over_hf"] is not None) == (row["kind"] == "ours")
        assert len(row["losses"]) == (2 if trains else 0)
        assert any("flash_attention" in name for name in row["costs"]) == trains
    ours, theirs, *_ = rows
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert ours["losses"][1] < ours["losses"][0]


def test_losses_that_differ_are_not_equal(script: dict[str, Any]) -> None:
    def row(model: str, *losses: float) -> dict[str, Any]:
        return {"model": model, "losses": list(losses)}

    equal = script["compare_losses"]
    assert equal([row("a", 4.0, 3.0), row("a", 4.0, 3.01), row("a"), row("b", 9.0, 9.0)], 0.01) is True
    assert equal([row("a", 4.0, 3.0), row("a", 4.0, 3.1)], 0.01) is False
    assert equal([row("a", 4.0, 3.0), row("a"), row("b", 9.0, 9.0)], 0.01) is None


def test_an_unknown_piece_is_one_line(script: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert script["main"](["--small", "-c", "attention/gq"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: no file and no shipped piece is called")


@pytest.mark.slow
def test_an_arm_in_a_process_of_its_own(script: dict[str, Any]) -> None:
    args = script["parse"](["--length", "8", "--seconds", "0", "--precision", "fp32", "-c", "attention/gqa"])
    found = script["measure_apart"](script["Arm"]("peak"), args)
    assert len(found.seconds) >= 2
