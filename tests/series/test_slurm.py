"""What is handed to SLURM, with a stand-in for `sbatch`, and what a task of an array runs."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvpath.errors import UserError
from kvpath.series.slurm import submit
from tests.nodes import LAUNCHERS, environment
from tests.series.studies import finish, job_of, progress_of

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")

SEARCH: dict[str, Any] = {"set": "model.optimizer.learning_rate", "values": [0.001, 0.01]}


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a stand-in writes down how it was called; job numbers count from 101."""
    calls = tmp_path / "calls"
    program(tmp_path / "bin", "sbatch", f'echo "$*" >> {calls}; echo "$((100 + $(wc -l < {calls})));cluster"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return calls


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / name).chmod(0o755)


def options(call: str) -> list[str]:
    return [word for word in call.split() if word.startswith(("--job-name", "--array", "--dependency"))]


def test_an_array_for_each_stage_each_task_after_its_own(tmp_path: Path, sbatch: Path) -> None:
    assert submit(progress_of(tmp_path, "--trainer.devices=8", test={}), "--time=1:00:00 --nodes=2") == 0
    calls = sbatch.read_text().splitlines()
    assert [options(call) for call in calls] == [
        ["--job-name=short", "--array=0-3"],
        ["--job-name=long", "--array=0-3", "--dependency=aftercorr:101"],
        ["--job-name=long-test", "--array=0-3", "--dependency=aftercorr:102"],
    ]
    assert all(call.endswith(f" --time=1:00:00 --nodes=2 {LAUNCHERS / 'slurm.sbatch'}") for call in calls)
    progress = progress_of(tmp_path)
    lines = (tmp_path / "study" / "slurm" / "long.tasks").read_text().splitlines()
    assert lines[2] == job_of(progress, "wide-seed1", "long").line(progress.study, ["--trainer.devices=8"])


def test_what_is_done_is_an_empty_line_and_whole_cells_are_left_out(tmp_path: Path, sbatch: Path) -> None:
    for run in ("gqa-seed1/short", "gqa-seed1/long", "gqa-seed2/short"):
        finish(tmp_path / "study" / run)
    assert submit(progress_of(tmp_path)) == 0
    assert options(sbatch.read_text().splitlines()[0]) == ["--job-name=short", "--array=0-2"]
    lines = (tmp_path / "study" / "slurm" / "short.tasks").read_text().splitlines()
    assert [bool(line) for line in lines] == [False, True, True]


def test_cells_wait_for_all_of_a_search(tmp_path: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(progress_of(tmp_path, search=SEARCH), dry_run=True) == 0
    assert not sbatch.exists()
    calls = capsys.readouterr().out.splitlines()
    assert [options(call.replace("'", "")) for call in calls] == [
        ["--job-name=search-short", "--array=0-3"],
        ["--job-name=short", "--array=0-3", "--dependency=afterany:<search-short>"],
        ["--job-name=long", "--array=0-3", "--dependency=aftercorr:<short>"],
    ]


def test_what_cannot_be_submitted_is_one_line(tmp_path: Path, sbatch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "sbatch", 'echo "sbatch: error: no such partition" >&2; exit 1')
    with pytest.raises(UserError, match="^sbatch refused with exit code 1: sbatch: error: no such partition$"):
        submit(progress_of(tmp_path))
    finish(tmp_path / "study" / "gqa-seed1" / "long")
    with pytest.raises(UserError, match="gqa-seed1/long: the stage before it, .* is not finished"):
        submit(progress_of(tmp_path))
    shutil.rmtree(tmp_path / "study")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no sbatch here; --dry-run"):
        submit(progress_of(tmp_path))


@pytest.mark.parametrize(("task", "expected"), [(0, ["fit", "-c=a b", "--run=r", "--rate=0.001"]), (1, None)])
def test_a_task_runs_its_line(tmp_path: Path, task: int, expected: list[str] | None) -> None:
    log, tasks = tmp_path / "log", tmp_path / "tasks"
    program(tmp_path / "bin", "srun", f'printf "%s\\n" "$@" >> {log}; exit 75')
    program(tmp_path / "bin", "scontrol", f'echo "scontrol $*" >> {log}')
    program(tmp_path / "bin", "kvpath", '[[ "$*" == "series chosen s.yaml gqa" ]] && echo 0.001')
    tasks.write_text("fit '-c=a b' --run=r --rate=\"$(kvpath series chosen s.yaml gqa)\"\n\nfit --run=other\n")
    path = f"{tmp_path / 'bin'}{os.pathsep}{environment()['PATH']}"
    variables = {"PATH": path, "VENV": "", "TASKS": str(tasks), "SLURM_ARRAY_TASK_ID": str(task), "SLURM_JOB_ID": "9"}
    command = ["bash", str(LAUNCHERS / "slurm.sbatch")]
    ended = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = log.read_text().splitlines() if log.exists() else None
    assert lines == (expected and ["--kill-on-bad-exit=1", "kvpath", *expected, "scontrol requeue 9"])
