"""The one command: its table, and what it says of a reader that has gone or a disk that takes nothing."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from kvpath.cli.main import COMMANDS
from kvpath.cli.resume import config_for_evaluation
from kvpath.training.run_directory import RunDirectory
from tests.runs import kvpath

CHECKOUT = Path(__file__).parent.parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(CHECKOUT)}


def test_every_command_is_there_and_described(capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in COMMANDS.items():
        assert callable(getattr(import_module(command.module), command.function)), name
    assert kvpath("--help") == 0
    help_lines = capsys.readouterr().out.splitlines()
    assert all(f"  {name:<10} {command.help}" in help_lines for name, command in COMMANDS.items())


@pytest.mark.parametrize("argv", [["configs"], ["--help"], ["configs", "model/98m"]])
def test_a_reader_that_has_gone_ends_it_silently(argv: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "kvpath", *argv],
            env=ENVIRONMENT,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.EDQUOT, "the disk quota is used up for a/file"),
        (errno.EACCES, "permission denied for a/file"),
        (errno.EROFS, "the file system is read-only for a/file"),
    ],
)
def test_a_disk_that_takes_nothing_is_one_line(
    code: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(argv: list[str]) -> int:
        raise OSError(code, os.strerror(code), "a/file")

    monkeypatch.setattr("kvpath.cli.main._dispatch", refuse)
    assert kvpath("fit") == 2
    assert capsys.readouterr().err == f"kvpath: error: {message}\n"


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own that nothing can be written to."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount a disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_run_directory_that_cannot_be_written(toy: Path, read_only: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvpath("fit", "-c", toy, "--run", read_only / "run") == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line == f"kvpath: error: the file system is read-only for {read_only / 'run'}"


def test_a_run_in_use_is_refused_and_left_alone(
    toy: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    holding = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", holding, str(run / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        assert kvpath("fit", "-c", toy, "--run", run) == 2
        assert f"kvpath: error: run {run}: another process is training in there\n" in capsys.readouterr().err
        assert [path.name for path in run.iterdir()] == [".lock"]
        dry = ["--trainer.fast_dev_run", "true"]
        assert kvpath("fit", "-c", toy, "--run", run, *dry) == 0  # which writes nothing
    finally:
        holder.kill()
        holder.wait()
    with (run / ".lock").open("a") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_configuration_for_now_is_gone_at_the_end(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("atexit.register", lambda do, *rest, **named: at_exit.append(partial(do, *rest, **named)))
    written = config_for_evaluation(RunDirectory(trained))
    assert written.parent.parent == tmp_path
    for do in at_exit:
        do()
    assert list(tmp_path.iterdir()) == []


# What a run stores ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--trainer.max_steps=2", "--trainer.limit_train_batches=2"])
def test_what_shortens_an_attempt_is_none_of_the_run_s(toy: Path, tmp_path: Path, flag: str) -> None:
    run = tmp_path / "run"
    assert kvpath("fit", "-c", toy, "--run", run, flag, "--trainer.max_time=00:01:00:00") == 0
    stored = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["trainer"]
    assert (stored["max_steps"], stored["limit_train_batches"], stored["max_time"]) == (-1, None, None)
    assert kvpath("fit", "--run", run, "--ckpt_path", "last") == 0
    assert '"step": 6,' in (run / "summary.json").read_text(encoding="utf-8")


def test_a_resume_that_is_refused_late_leaves_the_logs(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    arguments = {"save_dir": str(run), "name": "csv", "version": ""}
    csv = json.dumps({"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": arguments})
    more = ["--trainer.logger", csv, "--every.save=2 steps"]
    assert kvpath("fit", "-c", toy, "--run", run, *more, "--trainer.max_steps=5") == 0
    (run / "checkpoints" / "last.ckpt").unlink()  # the one before is of step 4
    files = [*run.glob("*.jsonl"), *run.rglob("metrics.csv")]
    before = {file: file.read_bytes() for file in files}
    assert len(before) == 3
    wider = ["--model.backbone.d_ff=32", "--allow", "[model]"]
    assert kvpath("fit", "--run", run, "--ckpt_path", "last", *wider) == 2
    assert "previous.ckpt is of another model" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in files} == before
    assert kvpath("fit", "--run", run, "--ckpt_path", "last") == 0
    rows = next(run.rglob("metrics.csv")).read_text(encoding="utf-8").splitlines()
    assert sum("," in row for row in rows) == len(rows) >= 7


def test_weights_of_a_run_with_another_tokenizer_are_refused_by_name(
    toy: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ["fit", "-c", toy, "--run", tmp_path / "run", "--data.tokenizer.vocab_size=290"]
    export = tmp_path / "export"
    assert kvpath("export", "--ckpt_path", trained, "--output", export) == 0
    for start in (trained, trained / "checkpoints" / "last.ckpt", export):
        assert kvpath(*other, "--init_from", start) == 2
        error = capsys.readouterr().err
        assert f"init_from {start} was trained with another tokenizer than data.tokenizer" in error
        assert not (tmp_path / "run" / "config.yaml").exists()
    assert kvpath(*other, "--init_from", trained, "--allow", "[data]") == 0
    assert kvpath("fit", "-c", toy, "--run", tmp_path / "same", "--init_from", export) == 0
