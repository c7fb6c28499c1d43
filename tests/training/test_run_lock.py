"""Two runs never write to one directory at a time."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpath.errors import UserError
from kvpath.training import run_lock
from kvpath.training.run_lock import only_writer


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[int]:
    """A process that holds the lock of `run` and does nothing else."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        with only_writer(tmp_path / "run"):
            os.write(writing, b"held")
            signal.pause()
    os.close(writing)
    assert os.read(reading, 4) == b"held"
    os.close(reading)
    yield process
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def test_another_process_is_named_and_a_kill_lets_go(tmp_path: Path, holder: int) -> None:
    run = tmp_path / "run"
    named = f"run {run}: process {holder} on .* is training in there"
    with pytest.raises(UserError, match=named), only_writer(run):
        pass
    os.kill(holder, signal.SIGKILL)
    os.waitid(os.P_PID, holder, os.WEXITED | os.WNOWAIT)
    assert [path.name for path in run.iterdir()] == [".lock"]
    with only_writer(run):
        (run / "file").touch()
    assert [path.name for path in run.iterdir()] == ["file"]


def test_a_directory_in_which_nothing_was_written_goes(tmp_path: Path) -> None:
    with only_writer(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").exists()
    assert not (tmp_path / "run").exists()


def test_who_holds_it_is_asked_without_taking_it(tmp_path: Path, holder: int) -> None:
    lock = tmp_path / "run" / ".lock"
    for _ in range(2):
        assert (run_lock.holder(lock) or "").startswith(f"process {holder} on ")
    os.kill(holder, signal.SIGKILL)
    os.waitid(os.P_PID, holder, os.WEXITED | os.WNOWAIT)
    assert lock.exists()
    assert run_lock.holder(lock) is None
    assert run_lock.holder(tmp_path / "nowhere") is None
