import os
from pathlib import Path

import pytest

from tests.runs import kvpath, write_config


@pytest.fixture(scope="package")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of a run of six steps."""
    return write_config(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="package")
def trained(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of that run; only to be read."""
    folder = tmp_path_factory.mktemp("trained")
    before = os.getcwd()
    os.chdir(folder)  # what Lightning would leave about is found here
    try:
        assert kvpath("fit", "-c", toy, "--run", folder / "run") == 0
    finally:
        os.chdir(before)
    return folder / "run"
