import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpath.config import backbone_from
from kvpath.errors import UserError
from kvpath.training.stored_config import FORMAT_VERSION, read_checkpoint, to_plain
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
