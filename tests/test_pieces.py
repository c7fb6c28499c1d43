from pathlib import Path

import pytest

from kvpath import pieces
from kvpath.errors import UserError


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of three shipped pieces; the current directory is another, empty one."""
    root = tmp_path / "shipped"
    for name, text in {
        "attention/gqa": "# Grouped queries.\n# More.\nheads: 4\n",
        "attention/mla": "heads: 4\n",
        "model/98m": "\n#Small.\nd_model: 8\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / f"{name}.yaml").write_text(text)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(pieces, "root", lambda: root)
    return root


@pytest.mark.usefixtures("root")
def test_available_gives_names_and_first_comments() -> None:
    assert pieces.available() == {"attention/gqa": "Grouped queries.", "attention/mla": "", "model/98m": "Small."}


def test_a_folder_s_own_pieces_are_without_those_of_its_folders(root: Path) -> None:
    (root / "attention" / "large").mkdir(parents=True)
    (root / "attention" / "large" / "mha.yaml").write_text("{}")
    assert "attention/large/mha" in pieces.available()
    assert "attention/large/mha" not in pieces.directly_in("attention")
    assert set(pieces.directly_in("attention")) >= {"attention/gqa"}


def test_a_local_file_comes_before_the_shipped_piece(root: Path) -> None:
    assert pieces.resolve("attention/gqa") == root / "attention/gqa.yaml"
    Path("attention").mkdir()
    Path("attention/gqa.yaml").touch()
    assert pieces.resolve("attention/gqa") == Path("attention/gqa.yaml")
    Path("attention/gqa").touch()
    assert pieces.resolve("attention/gqa") == Path("attention/gqa")


def test_a_local_folder_does_not_hide_the_piece(root: Path) -> None:
    Path("attention/gqa").mkdir(parents=True)
    assert pieces.resolve("attention/gqa") == root / "attention/gqa.yaml"


def test_a_piece_may_be_named_with_its_suffix(root: Path) -> None:
    assert pieces.resolve("model/98m.yaml") == root / "model/98m.yaml"


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    ("name", "nearest"), [("attention/gqq", "attention/gqa"), ("mla", "attention/mla"), ("modle/98m", "model/98m")]
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UserError, match=f"'{name}': did you mean .*{nearest}.*kvpath configs"):
        pieces.resolve(name)


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("name", ["zzzzzz", "", "attention/../model/98m", "attention"])
def test_names_outside_the_list_are_unknown(name: str) -> None:
    with pytest.raises(UserError, match="kvpath configs"):
        pieces.resolve(name)


def test_resolve_argv_touches_only_the_values_of_config(root: Path) -> None:
    gqa = str(root / "attention/gqa.yaml")
    argv = ["fit", "-c", "attention/gqa", "--config", "attention/gqa", "-c=attention/gqa", "--config=attention/gqa"]
    rest = ["--trainer.callbacks=model/98m", "--run", "model/98m", "--confi", "model/98m", "-c"]
    assert pieces.resolve_argv(argv + rest) == [
        "fit",
        "-c",
        gqa,
        "--config",
        gqa,
        f"-c={gqa}",
        f"--config={gqa}",
        *rest,
    ]
    assert pieces.resolve_argv(["-c", "--run", "model/98m"]) == ["-c", "--run", "model/98m"]


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("argv", [["fit", "-c", "nowhere"], ["fit", "--config=nowhere"]])
def test_resolve_argv_refuses_unknown_pieces(argv: list[str]) -> None:
    with pytest.raises(UserError, match="'nowhere'"):
        pieces.resolve_argv(argv)


def test_every_shipped_piece_says_what_it_is() -> None:
    shipped = pieces.available()
    assert shipped
    assert [name for name, comment in shipped.items() if not comment] == []


def test_composed_values_are_merged_key_by_key(root: Path) -> None:
    (root / "a.yaml").write_text("data: {budget: {tokens: 5.5e2, micro_batch: 1}}\ntrainer: {strategy: ddp}\n")
    (root / "b.yaml").write_text("data: {seq_len: 8}\ntrainer: {strategy: {class_path: ZeRO}}\n")
    files = [root / "a.yaml", root / "b.yaml"]
    assert pieces.compose(files, ["--data.budget.tokens=9e3", "--data.budget.micro_batch", "2", "--name", "x"]) == {
        "data": {"budget": {"tokens": 9000.0, "micro_batch": 2}, "seq_len": 8},
        "trainer": {"strategy": {"class_path": "ZeRO"}},
        "name": "x",
    }
