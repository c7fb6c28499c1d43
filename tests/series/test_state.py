"""What is done, what has changed since, what a search decided, and what a status and a plan say of it."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpath.cli.composing import Composer
from kvpath.errors import UserError
from kvpath.series.estimate import Rate, estimate, plan_lines
from kvpath.series.state import Progress
from kvpath.series.status import status
from kvpath.series.worker import Workers
from tests.series.studies import STAGES, finish, job_of, progress_of

SEARCH: dict[str, Any] = {"set": "model.optimizer.learning_rate", "values": [0.001, 0.01]}


def trained(progress: Progress, cell: str, stage: str) -> Path:
    """As if this run had been trained with what the file says."""
    job = job_of(progress, cell, stage)
    finish(job.directory)
    command = progress.command(job)
    assert command is not None
    (job.directory / "config.yaml").write_text(Composer().stored(command), encoding="utf-8")
    return job.directory


def test_a_run_whose_configuration_changed_is_named_and_left_alone(
    tmp_path: Path, stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trained(progress_of(tmp_path), "wide-seed1", "short")
    same = progress_of(tmp_path, "--trainer.devices=2", "--data.budget.micro_batch=1", "--every.log=2 steps")
    assert same.state(job_of(same, "wide-seed1", "short")).word == "done"
    axes = {
        "layout": {"gqa": None, "wide": {"set": {"model.backbone.d_ff": 40}}},
        "seed": {"set": ["model.seed", "data.seed"], "values": [1]},
    }
    progress = progress_of(tmp_path, axes=axes)
    state = progress.state(job_of(progress, "wide-seed1", "short"))
    assert (state.word, state.detail) == ("changed", "model.backbone.d_ff was 32 and is now 40")
    files = {path: path.read_bytes() for path in before.iterdir()}
    assert Workers(progress, 1, [str(stand_in)]).run() == 2
    assert {path: path.read_bytes() for path in before.iterdir()} == files
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"{before}: ")]
    assert "model.backbone.d_ff was 32 and is now 40: it was not trained with this file" in line
    assert [progress.state(job).word for job in progress.jobs] == ["done", "done", "changed", "waiting"]


def test_a_setting_that_is_no_longer_there_counts_as_changed(tmp_path: Path) -> None:
    trained(progress_of(tmp_path, set={"model.z_loss": 0.5}), "gqa-seed1", "short")
    progress = progress_of(tmp_path)
    state = progress.state(job_of(progress, "gqa-seed1", "short"))
    assert state.detail == "model.z_loss was 0.5 and is now 0.0"


def test_a_stage_whose_weights_came_from_a_run_that_is_gone_has_changed(tmp_path: Path) -> None:
    finish(tmp_path / "study" / "gqa-seed1" / "long")
    progress = progress_of(tmp_path)
    state = progress.state(job_of(progress, "gqa-seed1", "long"))
    assert state.word == "changed"
    assert state.detail == f"the stage before it, {tmp_path}/study/gqa-seed1/short, is not finished"


def test_a_candidate_that_diverges_is_not_chosen_and_the_edge_is_named(tmp_path: Path) -> None:
    progress = progress_of(tmp_path, search={**SEARCH, "values": [0.001, 0.01, 0.1]})
    runs = {job.candidate[1]: job for job in progress.jobs if job.candidate and job.candidate[0] == "gqa"}
    finish(runs["0.001"].directory, loss=3.0)
    finish(runs["0.01"].directory, loss=2.5)
    assert progress.decision("gqa") is None
    runs["0.1"].directory.mkdir(parents=True)
    (runs["0.1"].directory / "events.jsonl").write_text(json.dumps({"action": "stop"}) + "\n", encoding="utf-8")
    assert progress.state(runs["0.1"]).word == "diverged"
    assert progress.decision("gqa") == 0.01
    found = json.loads((tmp_path / "study" / "search" / "gqa.json").read_text(encoding="utf-8"))
    assert [one["mean"] for one in found["candidates"]] == [3.0, 2.5, None]
    assert not found["at_the_edge"]
    assert "search gqa: 0.01 (0.001: 3.0000, 0.01: 2.5000, 0.1: diverged)" in status(progress)


def test_a_decision_stays_when_its_runs_are_gone_and_not_when_it_is_about_others(tmp_path: Path) -> None:
    progress = progress_of(tmp_path, search=SEARCH)
    runs = [job for job in progress.jobs if job.candidate and job.candidate[0] == "gqa"]
    for loss, job in zip((2.0, 3.0), runs, strict=True):
        finish(job.directory, loss=loss)
    assert progress.decision("gqa") == 0.001
    for job in runs:
        (job.directory / "summary.json").unlink()
    assert progress.decision("gqa") == 0.001
    assert "it is at the edge of what was tried" in status(progress)
    other = progress_of(tmp_path, search={**SEARCH, "values": [0.001, 0.02]})
    assert other.decision("gqa") is None


def test_a_candidate_that_was_trained_otherwise_decides_nothing(tmp_path: Path) -> None:
    progress = progress_of(tmp_path, search=SEARCH)
    for job in progress.jobs:
        if job.candidate:
            trained(progress, job.cell, job.stage)
    other = progress_of(tmp_path, search={**SEARCH, "change": {"data.budget.tokens": 128}})
    assert other.decision("gqa") is None
    assert {other.state(job).word for job in other.jobs if job.candidate} == {"changed"}
    assert progress.decision("gqa") == 0.001


def test_a_stage_after_one_that_changed_has_changed(tmp_path: Path) -> None:
    before = progress_of(tmp_path)
    trained(before, "gqa-seed1", "short")
    trained(before, "gqa-seed1", "long")
    stages = [{"name": "short", "pieces": [], "set": {"model.z_loss": 0.5}}, STAGES[1]]
    progress = progress_of(tmp_path, stages=stages)
    state = progress.state(job_of(progress, "gqa-seed1", "long"))
    assert (state.word, state.detail) == ("changed", "in the stage before it, model.z_loss was 0.0 and is now 0.5")


def test_cells_of_an_earlier_choice_have_changed(tmp_path: Path) -> None:
    def chosen(losses: tuple[float, float]) -> Progress:
        progress = progress_of(tmp_path, search=SEARCH)
        for loss, job in zip(losses, [job for job in progress.jobs if job.candidate], strict=False):
            finish(job.directory, loss=loss)
        (tmp_path / "study" / "search" / "gqa.json").unlink(missing_ok=True)
        return progress

    trained(chosen((2.0, 3.0)), "gqa-seed1", "short")
    progress = chosen((3.0, 2.0))
    state = progress.state(job_of(progress, "gqa-seed1", "short"))
    assert state.detail == "model.optimizer.learning_rate was 0.001 and is now 0.01"


def test_status_is_a_table(tmp_path: Path) -> None:
    finish(tmp_path / "study" / "gqa-seed1" / "short", loss=3.25)
    run = tmp_path / "study" / "gqa-seed2" / "short"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "last.ckpt").touch()
    (run / "metrics.jsonl").write_text('{"step": 4, "validation/loss": 4.5}\n', encoding="utf-8")
    lines = status(progress_of(tmp_path, test={})).splitlines()
    assert lines[0].split() == ["cell", "short", "long", "test", "long"]
    assert lines[2].split() == ["gqa-seed1", "done", "3.2500", "to", "do", "waiting"]
    assert lines[3].split() == ["gqa-seed2", "stopped,", "step", "4", "4.5000", "waiting", "waiting"]
    assert lines[-1] == "12 runs and tests: 1 done, 3 to do, 7 waiting, 1 stopped"


def test_hours_follow_from_tokens_and_rate(tmp_path: Path) -> None:
    progress = progress_of(tmp_path)
    job = job_of(progress, "gqa-seed1", "long")
    found = estimate(job, progress, Rate(tokens_per_second=2.0, devices=2))
    assert (found.tokens, found.steps, found.seconds) == (512, 8, 128.0)
    assert found.device_hours == pytest.approx(2 * 128 / 3600)
    assert found.disk == 3 * 3 * 4 * 14_160  # checkpoints x (weights and two moments) x float32
    assert estimate(job, progress, Rate()).seconds is None
    counted = estimate(job, progress, Rate(peak_flops=1e9, utilisation=0.5)).seconds
    wider = job_of(progress, "wide-seed1", "long")
    assert counted is not None
    assert 0 < counted < (estimate(wider, progress, Rate(peak_flops=1e9, utilisation=0.5)).seconds or 0)


def test_a_plan_sums_what_is_left_and_says_what_it_assumed(tmp_path: Path) -> None:
    finish(tmp_path / "study" / "gqa-seed1" / "short")
    lines = list(plan_lines(progress_of(tmp_path), Rate(tokens_per_second=1.0), workers=2))
    assert lines[0].endswith("done")
    assert lines[0].startswith(f"# {tmp_path}/study/gqa-seed1/short: 384 tokens in 6 steps, 6 min on 1, 0.11 GPU-hours")
    tokens = 3 * 384 + 4 * 512
    assert lines[-2].startswith(
        f"# 7 runs to train: {tokens:,} tokens, {tokens / 3600:.2f} GPU-hours, 53 min one after"
    )
    assert "27 min or more with 2 workers" in lines[-2]
    assert "1 tokens/s on one device" in lines[-1]
    assert "no rate was stated" in list(plan_lines(progress_of(tmp_path), Rate()))[-1]


def test_mistakes_of_runs_come_together(tmp_path: Path) -> None:
    axes = {"layout": {"a": {"set": {"model.backbone.d_ff": 0}}, "b": {"set": {"model.backbone.d_fff": 3}}}}
    with pytest.raises(UserError, match="a/short: .*d_ff must be positive.*; .*b/short: .*did you mean") as raised:
        list(plan_lines(progress_of(tmp_path, axes=axes), Rate()))
    assert "\n" not in str(raised.value)


def test_the_plan_asks_for_what_the_search_chose(tmp_path: Path) -> None:
    progress = progress_of(tmp_path, "--trainer.devices", "1", search=SEARCH)
    line = job_of(progress, "wide-seed1", "short").line(progress.study, progress.overrides)
    asked = f"$(kvpath series chosen {tmp_path / 'study.yaml'} wide)"
    assert shlex.split(line)[-3:] == [f"--model.optimizer.learning_rate={asked}", "--trainer.devices", "1"]


def test_paired_arms_have_the_same_seeds(tmp_path: Path) -> None:
    progress = progress_of(tmp_path)
    values = [yaml.safe_load(Composer().stored(progress.command(job) or [])) for job in progress.jobs]
    seeds = [(one["model"]["seed"], one["data"]["seed"]) for one in values]
    assert seeds == [(1, 1), (1, 1), (2, 2), (2, 2)] * 2
