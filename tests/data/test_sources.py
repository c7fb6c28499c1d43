"""Files, package files and Hub datasets as documents; their fingerprints; their mistakes."""

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser

from kvpath.data.sources import Files, Hub, PackageFiles, Source
from kvpath.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")
    return tmp_path / "texts"


def test_globs_are_sorted_deep_and_without_repetition(folder: Path) -> None:
    source = Files([str(folder / "b.txt"), str(folder / "**/*.txt")])
    assert list(source.documents()) == ["text of b.txt", "text of a.txt", "text of deep/c.txt"]
    assert list(replace(source, max_documents=2).documents()) == ["text of b.txt", "text of a.txt"]


def test_a_name_that_looks_like_a_glob_is_a_file_first(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("brackets")
    assert list(Files([str(tmp_path / "a[1].txt")]).documents()) == ["brackets"]


def test_all_mistakes_of_files_come_together(folder: Path) -> None:
    (folder / "empty.txt").touch()
    (folder / "d.csv").write_text("x")
    with pytest.raises(UserError) as error:
        Files([str(folder / "nope*.txt"), str(folder / "empty.txt"), str(folder / "d.csv")]).paths()
    for part in ("nothing matches", "nope*.txt", "empty.txt is empty", "d.csv has an unknown suffix", ".jsonl"):
        assert part in str(error.value)
    with pytest.raises(UserError, match="files is an empty list"):
        Files([]).paths()
    with pytest.raises(UserError, match="max_documents must be at least 1 or null, got 0"):
        Files([str(folder / "a.txt")], max_documents=0).documents()


def test_fingerprint_changes_with_the_documents(folder: Path) -> None:
    source = Files([str(folder / "*.txt")])
    before = source.fingerprint()
    assert before == Files([str(folder / "*.txt")]).fingerprint()
    assert before != replace(source, text_field="body").fingerprint()
    assert before != replace(source, max_documents=1).fingerprint()
    os.utime(folder / "a.txt", ns=(1, 1))
    touched = source.fingerprint()
    assert touched != before
    (folder / "new.txt").write_text("new")
    assert source.fingerprint() not in (before, touched)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    root = tmp_path / "site" / "kvpath_test_texts"
    (root / "data").mkdir(parents=True)
    (root / "__init__.py").write_text("raise RuntimeError('imported')")
    (root / "data" / "one.txt").write_text("one")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return root.name


def test_a_package_is_read_and_not_imported(package: str) -> None:
    source = PackageFiles(package, "data/*.txt")
    assert list(source.documents()) == ["one"]
    assert source.fingerprint() == source.fingerprint()
    assert package not in sys.modules


@pytest.mark.parametrize("name", ["kvpath_has_no_such_package", "not.a.name"])
def test_a_missing_package_says_what_to_install(name: str) -> None:
    with pytest.raises(UserError, match=f"pip install {name}"):
        PackageFiles(name, "*.txt").fingerprint()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"body": f"row {i}"}) + "\n" for i in range(5)))
    return path


def test_hub_reads_local_data_files_and_folders(rows: Path) -> None:
    by_format = Hub("json", data_files=[str(rows)], text_field="body")
    assert list(by_format.documents()) == [f"row {i}" for i in range(5)]
    assert list(Hub(str(rows.parent), text_field="body", max_documents=2).documents()) == ["row 0", "row 1"]
    before = by_format.fingerprint()
    assert before == replace(by_format).fingerprint() != replace(by_format, text_field="x").fingerprint()
    os.utime(rows, ns=(1, 1))
    assert by_format.fingerprint() != before


def test_hub_fingerprint_of_a_commit_needs_no_network() -> None:
    pinned = Hub("nobody/nothing", revision="0" * 40)
    assert pinned.fingerprint() != replace(pinned, revision="1" * 40).fingerprint()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_field": "text"}, "rows, split 'train', row 1: no field 'text' .*; the fields are body"),
        ({"split": "test"}, "rows' cannot be read: Bad split: test"),
        ({"path": "/no/such/folder"}, "'/no/such/folder' cannot be read"),
    ],
)
def test_hub_mistakes_are_named(rows: Path, change: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(replace(Hub(str(rows.parent), text_field="body"), **change).documents())  # type: ignore[arg-type]


@dataclass
class Settings:
    """Holds a source.

    Args:
        source: any.
    """

    source: Source


def test_sources_are_chosen_by_class_path_and_saved_so() -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(Settings)
    parsed = parser.parse_args(["--source=Files", "--source.files=[a.txt, b.txt]", "--source.max_documents=3"])
    again = parser.parse_string(parser.dump(parsed))
    assert parser.instantiate_classes(again).source == Files(["a.txt", "b.txt"], max_documents=3)
