"""Files of every format that is still read: what they hold has not changed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

import kvpath
from kvpath.errors import UserError
from kvpath.training.stored_config import FORMAT_VERSION

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("format-*"))


def test_the_present_format_has_its_files() -> None:
    assert f"format-{FORMAT_VERSION}" in [folder.name for folder in FIXTURES]


@pytest.mark.parametrize("what", ["run", "exported"])
@pytest.mark.parametrize("folder", FIXTURES, ids=lambda folder: folder.name)
def test_logits_are_those_of_the_day_it_was_written(folder: Path, what: str) -> None:
    found, stored = kvpath.load(folder / what), load_file(folder / "logits.safetensors")
    with torch.no_grad():
        assert_close(found.model(stored["tokens"]), stored["logits"], atol=1e-5, rtol=1e-5)
    assert found.tokenizer is not None
    assert found.tokenizer.decode(found.tokenizer.encode("naïve 猫")) == "naïve 猫"


@pytest.mark.parametrize("folder", FIXTURES, ids=lambda folder: folder.name)
def test_files_are_small(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 200_000
    assert all(path.stat().st_size < 100_000 for path in folder.rglob("*"))


@pytest.mark.parametrize("what", ["run", "exported"])
def test_another_format_says_which_version_reads_it(what: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES[-1], tmp_path / "all")
    if what == "run":
        file = tmp_path / "all" / "run" / "checkpoints" / "last.ckpt"
        stored = torch.load(file, weights_only=True)
        stored["kvpath"] |= {"format_version": 99, "written_by": "7.0"}
        torch.save(stored, file)
    else:
        config = tmp_path / "all" / "exported" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"format_version": 99, "written_by": "7.0"}))
    message = f"has format_version 99, which kvpath 7.0 reads; this is kvpath .*, which reads {FORMAT_VERSION}"
    with pytest.raises(UserError, match=message):
        kvpath.load(tmp_path / "all" / what)
