"""Workers: who takes what, what a failure and a kill leave behind, and how a series ends."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpath.series.worker import Workers, devices_of
from tests.series.studies import finish, job_of, progress_of

Log = Callable[[str], list[str]]

ALL = [
    f"fit {cell}/{stage}"
    for cell in ("gqa-seed1", "gqa-seed2", "wide-seed1", "wide-seed2")
    for stage in ("short", "long")
]
FORK = multiprocessing.get_context("fork")


def run(folder: Path, program: Path, workers: int = 1, minutes: float | None = None, **changes: Any) -> int:
    return Workers(progress_of(folder, **changes), workers, [str(program)]).run(minutes)


def in_process(folder: Path, program: Path, workers: int = 1) -> "multiprocessing.process.BaseProcess":
    """Another `kvpath series run` on the same directory."""
    progress = progress_of(folder)
    process = FORK.Process(target=lambda: os._exit(Workers(progress, workers, [str(program)]).run()))
    process.start()
    return process


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_worker_does_a_cell_after_the_other(tmp_path: Path, stand_in: Path, log: Log) -> None:
    assert run(tmp_path, stand_in) == 0
    assert log("begins") == log("ends") == ALL


def test_a_stage_starts_from_the_one_before_and_has_the_values_of_its_cell(tmp_path: Path, stand_in: Path) -> None:
    assert run(tmp_path, stand_in) == 0
    lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(f"begins fit {tmp_path}/study/wide-seed2/long ")]
    assert line.split(" ", 3)[3].split() == [
        *("fit", f"-c={tmp_path / 'toy.yaml'}", f"--run={tmp_path}/study/wide-seed2/long", "--ckpt_path=last"),
        *(f"--init_from={tmp_path}/study/wide-seed2/short", "--model.backbone.d_ff=32", "--model.seed=2"),
        *("--data.seed=2", "--data.budget.tokens=512"),
    ]


def test_a_second_run_does_nothing_again(
    tmp_path: Path, stand_in: Path, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(tmp_path / "study" / "gqa-seed1" / "short")
    assert run(tmp_path, stand_in) == 0
    assert log("begins") == ALL[1:]
    capsys.readouterr()
    assert run(tmp_path, stand_in) == 0
    assert len(log("begins")) == len(ALL) - 1
    assert capsys.readouterr().err == "8 of 8 runs and tests are done already\n"


def test_no_two_workers_take_the_same_job(
    tmp_path: Path, stand_in: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW", "0.1")
    processes = [in_process(tmp_path, stand_in, workers=2) for _ in range(3)]
    for process in processes:
        process.join(60)
    assert sorted(log("begins")) == sorted(log("ends")) == sorted(ALL)
    assert {process.exitcode for process in processes} <= {0, 75}  # 75: nothing was free, and others were at work
    assert run(tmp_path, stand_in) == 0
    assert len(log("begins")) == len(ALL)


def test_what_a_killed_worker_ran_is_told_to_end_and_gone_on_with(
    tmp_path: Path, stand_in: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANG", "gqa-seed1/long")
    killed = in_process(tmp_path, stand_in)
    wait_until(lambda: "fit gqa-seed1/long" in log("begins"))
    assert killed.pid is not None
    progress = progress_of(tmp_path)
    state = progress.state(job_of(progress, "gqa-seed1", "long"))
    assert (state.word, state.detail.startswith(f"process {killed.pid} on ")) == ("running", True)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join(60)
    wait_until(lambda: log("told") == ["fit gqa-seed1/long"])
    monkeypatch.delenv("HANG")
    assert run(tmp_path, stand_in) == 0
    assert log("begins") == [*ALL[:2], *ALL[1:]]


def test_a_failure_is_shown_and_stops_no_other_cell(
    tmp_path: Path, stand_in: Path, log: Log, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAIL", "gqa-seed2/short")
    assert run(tmp_path, stand_in, workers=2) == 2
    assert sorted(log("begins")) == sorted(name for name in ALL if name != "fit gqa-seed2/long")
    run_directory = tmp_path / "study" / "gqa-seed2" / "short"
    line = f"{run_directory}: ended with exit code 2: kvpath: error: it would not"
    assert line in capsys.readouterr().err.splitlines()
    assert (run_directory / "log.txt").read_text() == "some line\nkvpath: error: it would not\n"
    progress = progress_of(tmp_path)
    assert progress.state(job_of(progress, "gqa-seed2", "short")).detail == "exit code 2: kvpath: error: it would not"
    monkeypatch.delenv("FAIL")
    assert run(tmp_path, stand_in) == 0
    assert log("begins")[-2:] == ["fit gqa-seed2/short", "fit gqa-seed2/long"]
    assert progress.state(job_of(progress, "gqa-seed2", "short")).word == "done"


def test_when_the_minutes_are_over_runs_are_told_and_none_is_started(
    tmp_path: Path, stand_in: Path, log: Log, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HANG", "gqa-seed1/short")
    assert run(tmp_path, stand_in, minutes=0.05) == 75
    assert log("told") == log("begins") == ALL[:1]
    assert "0.05 minutes are over" in capsys.readouterr().err
    monkeypatch.delenv("HANG")
    assert run(tmp_path, stand_in) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signals_are_handed_on(
    tmp_path: Path, stand_in: Path, log: Log, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("HANG", "gqa-seed1/short")
    stand_in.write_text(stand_in.read_text().replace("exit 75' TERM", "exit 75' TERM USR1 INT"))
    process = in_process(tmp_path, stand_in)
    wait_until(lambda: bool(log("begins")))
    assert process.pid is not None
    os.kill(process.pid, number)
    if number == signal.SIGINT:  # which a terminal gives to all, and the series to none
        time.sleep(0.3)
        assert process.is_alive()
        assert log("told") == []
        os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == (130 if number == signal.SIGINT else 75)
    assert log("told") == ["fit gqa-seed1/short"]


def test_the_test_comes_after_the_last_stage_and_is_done_once(tmp_path: Path, stand_in: Path, log: Log) -> None:
    test = {"set": {"data.eval_contexts": [16]}}
    assert run(tmp_path, stand_in, test=test) == 0
    assert log("begins")[:3] == ["fit gqa-seed1/short", "fit gqa-seed1/long", "test gqa-seed1/long"]
    assert len(log("begins")) == 12
    assert run(tmp_path, stand_in, test=test) == 0
    assert len(log("begins")) == 12
    assert run(tmp_path, stand_in, test={"set": {"data.eval_contexts": [16, 32]}}) == 0
    assert [name.split()[0] for name in log("begins")[12:]] == ["test"] * 4
    assert run(tmp_path, stand_in, test={"after": "each"}) == 0
    assert len(log("begins")) == 12 + 4 + 8


def test_arms_train_with_what_their_search_chose(
    tmp_path: Path, stand_in: Path, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    search = {
        "set": "model.optimizer.learning_rate",
        "values": [0.001, 0.01, 0.1],
        "seeds": {"set": ["model.seed", "data.seed"], "values": [8, 9]},
        "change": {"data.budget.tokens": 128},
    }
    losses = {"gqa": (3.0, 2.0, 2.5), "wide": (3.0, 2.0, 1.5)}
    (tmp_path / "losses").write_text(
        "".join(
            f"search/{arm}-learning_rate{value}-seed{seed}/short {loss + seed / 10}\n"
            for arm, row in losses.items()
            for value, loss in zip(search["values"], row, strict=True)
            for seed in (8, 9)
        )
    )
    assert run(tmp_path, stand_in, workers=2, search=search) == 0
    assert len(log("begins")) == 12 + 8
    commands = {
        line.split()[2]: line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("begins")
    }
    for arm, chosen in {"gqa": 0.01, "wide": 0.1}.items():
        assert commands[f"{tmp_path}/study/{arm}-seed1/short"].endswith(
            f"--data.seed=1 --model.optimizer.learning_rate={chosen}"
        )
        assert "learning_rate" not in commands[f"{tmp_path}/study/{arm}-seed1/long"]
    candidate = commands[f"{tmp_path}/study/search/wide-learning_rate0.1-seed9/short"]
    own = "--model.backbone.d_ff=32 --model.seed=9 --data.seed=9 --data.budget.tokens=128"
    assert candidate.endswith(f"{own} --model.optimizer.learning_rate=0.1")


def test_a_run_that_stops_early_is_not_started_from(
    tmp_path: Path, stand_in: Path, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.write_text(stand_in.read_text().replace('"step": 6', '"step": 3'))
    assert run(tmp_path, stand_in) == 75
    assert log("begins") == ALL[::2]
    assert "gqa-seed1/short: ended before the last step of its budget" in capsys.readouterr().err


def test_progress_says_cells_rate_and_what_is_left(
    tmp_path: Path, stand_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, stand_in) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if ": done in " in line]
    assert len(lines) == 8
    assert " · validation loss 3.5000 · 0 of 4 cells · " in lines[0]
    assert " tokens/s in all · about " in lines[0]
    assert " · 4 of 4 cells · " in lines[-1]
    assert "left" not in lines[-1]


def test_gpus_are_shared_out_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3,5,7")
    assert devices_of(1) == [None]
    assert devices_of(2) == ["0,1", "3,5"]
    assert devices_of(5) == ["0", "1", "3", "5", "7"]
    assert devices_of(6) == [None] * 6
