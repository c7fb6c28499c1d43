"""Where the cache is, and that nothing half-made is ever taken for whole."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvpath.data.cache import build_once, cache_dir, write_atomically
from kvpath.errors import UserError


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPATH_CACHE", "/chosen")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/chosen")
    monkeypatch.delenv("KVPATH_CACHE")
    assert cache_dir() == Path("/xdg/kvpath")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_dir() == Path("/home/someone/.cache/kvpath")


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "part").touch()
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        build_once(tmp_path / "made", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["made.lock"]


def test_a_killed_build_is_not_taken_for_whole_and_is_tidied_up(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from kvpath.data.cache import build_once
def build(directory):
    (directory / "part").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
build_once(Path(sys.argv[1]), build)
"""
    target = tmp_path / "made"
    killed = subprocess.run([sys.executable, "-c", script, str(target)], env=environment())
    assert killed.returncode == -signal.SIGKILL
    assert not target.exists()
    assert list(tmp_path.glob("*.part"))
    build_once(target, lambda directory: (directory / "whole").touch())
    assert [path.name for path in target.iterdir()] == ["whole"]
    assert not list(tmp_path.glob("*.part"))


def test_two_processes_build_once(tmp_path: Path) -> None:
    script = """
import sys, time
from pathlib import Path
from kvpath.data.cache import build_once
target = Path(sys.argv[1])
def build(directory):
    with (target.parent / "builds").open("a") as log:
        log.write("x")
    time.sleep(0.3)
    (directory / "whole").touch()
build_once(target, build)
assert [path.name for path in target.iterdir()] == ["whole"]
"""
    command = [sys.executable, "-c", script, str(tmp_path / "made")]
    processes = [subprocess.Popen(command, env=environment()) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert (tmp_path / "builds").read_text() == "x"


def test_the_first_of_two_builds_without_locks_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    def slow(directory: Path) -> None:
        (directory / "slow").touch()
        build_once(tmp_path / "made", lambda other: (other / "quick").touch())

    monkeypatch.setattr("kvpath.data.cache.fcntl.flock", no_locks)
    build_once(tmp_path / "made", slow)
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["quick"]


def test_a_full_disk_is_one_line_with_the_directory_and_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    (tmp_path / "file").write_text("old")
    monkeypatch.setattr("kvpath.data.cache.os.fsync", full)
    with pytest.raises(UserError, match=rf"cannot write to {tmp_path}: .* for 3 bytes; .*KVPATH_CACHE"):
        write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_text() == "old"
    with pytest.raises(UserError, match=f"cannot write to {tmp_path}"):
        build_once(tmp_path / "made", lambda directory: None)
    assert not (tmp_path / "made").exists()
    assert not list(tmp_path.glob("*.part"))


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
