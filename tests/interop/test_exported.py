import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.testing import assert_close

import kvpath
from kvpath.errors import UserError
from kvpath.interop.exported import read_export, write_export
from tests.cases import SHIPPED, Case, every_case, tokens

NAMES = {"model.safetensors", "config.json"}
CASE = SHIPPED[0]


@every_case
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_round_trip_gives_equal_logits(case: Case, tied: bool, tmp_path: Path) -> None:
    model = case.decoder(tied_embeddings=tied)
    write_export(tmp_path / "out", model, None, step=5)
    assert {path.name for path in (tmp_path / "out").iterdir()} == NAMES
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    back = kvpath.load(tmp_path / "out").model
    assert (back.head.weight is back.embedding.weight) == tied
    with torch.no_grad():
        assert torch.equal(back(tokens(2, 7)), model(tokens(2, 7)))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_tied_weight_is_stored_once(tied: bool, tmp_path: Path) -> None:
    model = CASE.decoder(tied_embeddings=tied)
    write_export(tmp_path / "out", model, None)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    assert set(model.state_dict()) - stored == ({"head.weight"} if tied else set())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tied"] == (
        {"head.weight": "embedding.weight"} if tied else {}
    )


def test_weights_keep_their_dtype(tmp_path: Path) -> None:
    model = CASE.decoder(torch.bfloat16)
    write_export(tmp_path / "out", model, None)
    back = kvpath.load(tmp_path / "out").model
    assert {value.dtype for value in back.state_dict().values()} == {torch.bfloat16}
    for name, value in model.state_dict().items():
        assert_close(back.state_dict()[name], value, atol=0, rtol=0)


def test_an_existing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"output {tmp_path}: it exists already"):
        write_export(tmp_path, CASE.decoder(), None)


def test_what_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_export(tmp_path / "out", CASE.decoder(), None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json cannot be read"),
        ("[]", "config.json must hold an object, got list"),
        ("{}", "config.json holds no kvpath format_version"),
        ('{"format_version": 1}', "backbone must hold the model's configuration, got None"),
        ('{"format_version": 1, "backbone": {}, "colour": 1}', "colour is not a key of this format"),
        (
            '{"format_version": 9, "written_by": "3.1"}',
            "config.json has format_version 9, which kvpath 3.1 reads; this is kvpath .*, which reads 1",
        ),
    ],
)
def test_a_damaged_config(text: str, message: str, tmp_path: Path) -> None:
    write_export(tmp_path / "out", CASE.decoder(), None)
    (tmp_path / "out" / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_export(tmp_path / "out" / "model.safetensors")


def test_a_missing_config(tmp_path: Path) -> None:
    write_export(tmp_path / "out", CASE.decoder(), None)
    (tmp_path / "out" / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        kvpath.load(tmp_path / "out")
