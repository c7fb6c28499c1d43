from collections.abc import Callable
from pathlib import Path

import pytest

from tests.series.studies import STAND_IN


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program to use in place of `kvpath`."""
    program = tmp_path / "stand_in"
    program.write_text(STAND_IN, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("LOSSES", str(tmp_path / "losses"))
    monkeypatch.setenv("STUDY", str(tmp_path / "study"))
    return program


@pytest.fixture
def log(tmp_path: Path) -> Callable[[str], list[str]]:
    """The runs below the study of which the stand-in wrote a word down, in order: "fit gqa-seed1/short"."""

    def of(word: str) -> list[str]:
        path = tmp_path / "log"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kinds = [line.split()[1:3] for line in lines if line.startswith(f"{word} ")]
        return [f"{kind} {Path(run).relative_to(tmp_path / 'study')}" for kind, run in kinds]

    return of
