import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpath.config import backbone_from
from kvpath.errors import UserError
from kvpath.training.stored_config import FORMAT_VERSION, Damaged, read_checkpoint, stored_step, to_plain
from tests.cases import SHIPPED, Case


@pytest.mark.parametrize("case", SHIPPED, ids=str)
def test_a_stored_model_is_built_again_from_plain_values(case: Case) -> None:
    backbone = case.config()
    plain = json.loads(json.dumps(to_plain(backbone)))
    assert backbone_from(plain) == backbone


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ([1, 2], "holds no kvpath format_version"),
        ({"state_dict": {}}, "holds no kvpath format_version"),
        ({"kvpath": "1"}, "holds no kvpath format_version"),
        ({"kvpath": {"format_version": FORMAT_VERSION + 1}}, f"has format_version {FORMAT_VERSION + 1}"),
    ],
)
def test_files_of_others_are_refused(tmp_path: Path, stored: Any, message: str) -> None:
    torch.save(stored, tmp_path / "file.ckpt")
    with pytest.raises(UserError, match=message):
        read_checkpoint(tmp_path / "file.ckpt")


def test_whatever_bytes_are_damaged_it_is_damaged_and_nothing_else(tmp_path: Path) -> None:
    whole, path, damaged = tmp_path / "whole.ckpt", tmp_path / "last.ckpt", 0
    stored = {"kvpath": {"format_version": FORMAT_VERSION}, "global_step": 3, "state_dict": {"a": torch.zeros(7)}}
    torch.save(stored, whole)
    content = whole.read_bytes()
    for seed in range(300):
        dice = random.Random(seed)
        start, size = dice.randrange(len(content)), dice.choice([1, 8, 100])
        path.write_bytes(content[:start] + dice.randbytes(size) + content[start + size :])
        try:
            stored_step(path)
        except UserError:
            damaged += 1
    assert damaged > 100


@pytest.mark.parametrize("name", ["global_step", "state_dict"])
def test_what_is_missing_is_named(tmp_path: Path, name: str) -> None:
    stored = {"kvpath": {"format_version": FORMAT_VERSION}, "global_step": 3, "state_dict": {}}
    del stored[name]
    torch.save(stored, tmp_path / "last.ckpt")
    with pytest.raises(Damaged, match=f"it has no {name}"):
        read_checkpoint(tmp_path / "last.ckpt")
