"""The script that kills a run: what it aims at, and one small round of it."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest


def test_of_twenty_kills_at_least_five_are_aimed_at_a_save(script: dict[str, Any]) -> None:
    for seed in range(5):
        aims = list(script["aims"](20, random.Random(seed)))
        assert len(aims) == 20
        assert set(aims) == set(script["PHASES"])
        assert aims.count("save") >= 5


@pytest.mark.slow
def test_a_killed_run_ends_as_one_left_alone(
    script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script["main"](["--kills", "2", "--steps", "120", "--folder", str(tmp_path / "study")]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert result["equal"]
    assert sum(result["fell_into"].values()) == 2
    assert sum(line.startswith("kill ") for line in lines) == 2


def test_a_kill_reaches_processes_in_sessions_of_their_own(script: dict[str, Any]) -> None:
    nested = "import subprocess, sys; subprocess.run(['sleep', '60'], start_new_session=True)"
    process = subprocess.Popen([sys.executable, "-c", nested])
    try:
        while not (found := script["descendants"](process.pid)) or os.getsid(found[0]) == os.getsid(process.pid):
            time.sleep(0.01)
        for pid in found:
            os.kill(pid, 9)
        process.wait(timeout=30)
    finally:
        process.kill()
    assert script["descendants"](process.pid) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--ranks", "2"], ["--ranks", "2", "--zero", "2"]], ids=["DDP", "ZeRO"])
def test_so_does_one_of_two_ranks(
    script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], how: list[str]
) -> None:
    if "--zero" in how:
        pytest.importorskip("deepspeed")
    assert script["main"](["--kills", "2", "--steps", "60", "--folder", str(tmp_path / "study"), *how]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["equal"]


@pytest.mark.parametrize("flag", ["--kills", "--steps", "--ranks"])
def test_a_number_that_makes_no_sense(script: dict[str, Any], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        script["main"]([flag, "0"])
    assert ended.value.code == 2
    assert f"{flag} must be positive, got 0" in capsys.readouterr().err
