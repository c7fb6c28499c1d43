import os
from pathlib import Path

import pytest
import torch

from kvpath.config import build_model, load_config
from kvpath.model import Decoder
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


@pytest.fixture(scope="package")
def decoder(trained: Path) -> Decoder:
    """The trained model, put together without Lightning, in float64; only to be read."""
    model = build_model(load_config(str(trained / "config.yaml")))
    stored = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    model.load_state_dict({name.removeprefix("model."): value for name, value in stored.items()})
    return model.double().eval()
