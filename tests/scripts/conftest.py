"""The script that a file of tests is about."""

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def script(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the script defines whose name the file of tests bears: `test_bench_eval.py` is about `bench_eval.py`."""
    return runpy.run_path(str(SCRIPTS / request.path.name.removeprefix("test_")))
