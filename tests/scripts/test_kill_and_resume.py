"""The script that kills a run: what it aims at, and one small round of it."""

import json
import random
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_and_resume.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


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


@pytest.mark.parametrize("flag", ["--kills", "--steps", "--ranks"])
def test_a_number_that_makes_no_sense(script: dict[str, Any], flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        script["main"]([flag, "0"])
    assert ended.value.code == 2
    assert f"{flag} must be positive, got 0" in capsys.readouterr().err
