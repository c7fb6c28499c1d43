"""A step that is not taken on the command line, and its batch looked into."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvpath.training.module import LanguageModel
from kvpath.training.stepping import PlainStepping
from tests.runs import kvpath


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of step 5 is no number."""
    clip = PlainStepping.clip

    def spoil(self: PlainStepping, limit: float | None) -> Any:
        norm = clip(self, limit)
        assert isinstance(self.module, LanguageModel)
        return norm * (math.nan if self.module.global_step == 4 else 1.0)

    monkeypatch.setattr(PlainStepping, "clip", spoil)


@pytest.fixture
def run(toy: Path, tmp_path: Path, poisoned: None) -> Path:
    """A run that left out a step."""
    assert kvpath("fit", "-c", toy, "--run", tmp_path / "run", "--on_nan", "skip") == 0
    return tmp_path / "run"


def test_a_run_stops_with_one_line(
    toy: Path, tmp_path: Path, poisoned: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run, saves = tmp_path / "run", ["--every.save", "2 steps"]
    assert kvpath("fit", "-c", toy, "--run", run, *saves) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("kvpath: error: step 5: the norm of the gradient is nan; its batch is in ")
    assert line.endswith(f"{run / 'checkpoints' / 'last.ckpt'} is as it was")
    assert not (run / "summary.json").exists()
    assert kvpath("fit", "-c", toy, "--run", run, "--ckpt_path", "last", "--on_nan", "back") == 0
    assert [json.loads(text)["action"] for text in (run / "events.jsonl").read_text().splitlines()] == ["stop", "back"]
    assert json.loads((run / "summary.json").read_text())["step"] == 6


def test_a_spike_rule_on_the_command_line(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rule = ["--on_spike.action", "stop", "--on_spike.steps", "2"]
    assert kvpath("fit", "-c", toy, "--run", tmp_path / "run", *rule, "--on_spike.deviations", "1000") == 0
    assert kvpath("fit", "-c", toy, "--run", tmp_path / "new", "--on_spike.deviations", "0") == 2
    assert "on_spike.deviations must be positive, got 0" in capsys.readouterr().err


def test_the_batch_is_recomputed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "bad_batches" / "step-000005-rank0.json"
    capsys.readouterr()
    assert kvpath("inspect", file, "--ckpt_path", run, "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["rank"], found["reason"]) == (5, 0, "the norm of the gradient is nan")
    assert (found["weights_of_step"], found["first_not_finite"]) == (6, None)
    assert [row["tokens"] for row in found["documents"]] == [16] * 4
    assert [len(of_sequence) > 0 for of_sequence in found["document_numbers"]] == [True] * 4
    layers = {row["name"]: row for row in found["layers"]}
    assert list(layers) == ["embedding", "blocks.0", "blocks.1", "norm", "head"]
    assert layers["embedding"]["largest_logit"] is None
    assert layers["blocks.1"]["largest_logit"] > -5
    assert all(row["activation_rms"] > 0 for row in layers.values())

    assert kvpath("inspect", file.with_suffix(".safetensors"), "--ckpt_path", run) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "step 5, rank 0: the norm of the gradient is nan"
    assert table[1].startswith("on the weights of step 6: loss ")
    assert table[2] == "first tensor that is not finite: none"
    assert len(table) == 5 + 4 + 2 + 5


def test_what_is_no_batch_or_no_run_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "bad_batches" / "step-000005-rank0.json"
    for argv, message in (
        ([run / "summary.json", "--ckpt_path", run], "is no batch that a run put aside"),
        ([file, "--ckpt_path", run / "nowhere"], "there is no such file or directory"),
        ([file], "the following arguments are required: --ckpt_path"),
        ([file, "--ckpt_path", run, "--device", "moon"], "device moon is not to be had"),
    ):
        assert kvpath("inspect", *argv) == 2
        assert message in capsys.readouterr().err
