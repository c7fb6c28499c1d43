import json
from typing import Any

import pytest

from kvpath.cli.plan import plan_command
from kvpath.errors import UserError
from tests.runs import kvpath

STUDY = [
    *("-c", "model/98m", "-c", "attention/kvpath_concat", "-c", "hardware/zero2"),
    *("--nodes", "2", "--devices", "8", "--memory", "80GB"),
    *("--model.backbone.d_model", "64", "--model.backbone.n_layers", "4", "--model.backbone.d_ff", "64"),
    *("--data.budget.global_batch_sequences", "32"),
]


def plan(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    assert kvpath("plan", *argv, "--format", "json") == 0
    stages: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return stages


def test_each_stage_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    stages = plan(capsys, *STUDY, "--stages", "stage/2k", "stage/8k", "--peak_flops", "989e12")
    assert [stage["name"] for stage in stages] == ["stage/2k", "stage/8k"]
    for stage in stages:
        assert stage["fits"]
        assert stage["best"]["total"] <= 76e9
        assert stage["plan"]["world_size"] == 16
        assert stage["seconds"] > 0
        parts = ("weights", "gradients", "optimizer", "buffers", "activations")
        assert stage["best"]["total"] == sum(stage["best"][part] for part in parts)
    assert stages[0]["best"]["weights"] == 2 * stages[0]["parameters"]


def test_a_table_says_what_to_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvpath("plan", *STUDY, "-c", "stage/2k") == 0
    text = capsys.readouterr().out
    assert "take this" in text
    assert "--data.budget.micro_batch" in text
    assert "state --peak_flops" in text


def test_what_does_not_fit_is_said_and_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvpath("plan", *STUDY, "-c", "stage/2k", "--memory", "200MB", "--reserve", "1MB") == 2
    assert "does not fit: one sequence needs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--nodes", "2"], "kvpath plan needs pieces"),
        (["-c", "model/98m", "-c", "attention/gqa"], "data.seq_len is not stated: add a stage piece"),
        ([*STUDY, "-c", "stage/2k", "--memory", "much"], "--memory must be a number of bytes"),
        ([*STUDY, "-c", "stage/2k", "--reserve", "9x"], "--reserve must be a number of bytes"),
        ([*STUDY, "-c", "stage/2k", "--nodes", "7"], "is not a multiple of"),
    ],
)
def test_mistakes_are_named(argv: list[str], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        plan_command(argv)
