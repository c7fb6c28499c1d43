from pathlib import Path

import pytest

from kvpath import pieces
from kvpath.cli.configs import configs
from kvpath.errors import UserError

GQA = "# Grouped queries, 64 wide.\nn_kv_heads: 4  # ü\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "shipped"
    for name, text in {"attention/gqa": GQA, "model/98m": "# Small.\n"}.items():
        (root / name).parent.mkdir(parents=True)
        (root / f"{name}.yaml").write_text(text, encoding="utf-8")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(pieces, "root", lambda: root)
    return here


def test_lists_all_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    assert configs([]) == 0
    assert capsys.readouterr().out == "attention/gqa  Grouped queries, 64 wide.\nmodel/98m      Small.\n"


def test_prints_a_piece(capsys: pytest.CaptureFixture[str]) -> None:
    assert configs(["attention/gqa"]) == 0
    assert capsys.readouterr().out == GQA


@pytest.mark.parametrize(("folder", "target"), [([], "attention/gqa.yaml"), (["mine"], "mine/attention/gqa.yaml")])
def test_copies_a_piece_and_says_where(folder: list[str], target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert configs(["attention/gqa", "--copy", *folder]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert Path(target).read_text(encoding="utf-8") == GQA


def test_a_copy_made_here_is_what_the_name_then_means() -> None:
    configs(["attention/gqa", "--copy"])
    assert pieces.resolve("attention/gqa") == Path("attention/gqa.yaml")


def test_a_copy_never_overwrites(here: Path) -> None:
    mine = here / "attention/gqa.yaml"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(UserError, match=r"overwrite.*attention/gqa\.yaml"):
        configs(["attention/gqa", "--copy"])
    assert mine.read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_the_users_mistake(here: Path) -> None:
    (here / "file").touch()
    with pytest.raises(UserError, match=r"cannot write file/attention/gqa\.yaml"):
        configs(["attention/gqa", "--copy", "file"])


@pytest.mark.parametrize("argv", [["attention/gqq"], ["attention/gqq", "--copy"]])
def test_an_unknown_piece_is_answered_with_the_nearest(argv: list[str]) -> None:
    with pytest.raises(UserError, match="attention/gqa"):
        configs(argv)


def test_copy_without_a_name_is_refused() -> None:
    with pytest.raises(UserError, match="--copy needs the NAME of a piece"):
        configs(["--copy"])
