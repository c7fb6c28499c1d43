"""Files, package files and Hub datasets as documents; their fingerprints; their mistakes."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser

from kvpath.data.regions import Split
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


def in_parts(source: Source) -> list[tuple[int, str]]:
    return [pair for part in source.parts() for pair in part.numbered()]


def test_parts_in_their_order_are_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpath.data.sources.files._TOGETHER", 20)
    for name, text in {"a": "x" * 15, "b": "y" * 5, "c": "z", "d": "w" * 30, "f": "v"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "e.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    source = Files([str(tmp_path / "*")])
    parts = source.parts()
    texts = [[text for _, text in part.numbered()] for part in parts]
    assert texts == [["x" * 15, "y" * 5], ["z"], ["w" * 30], ["one", "two"], ["v"]]
    assert [part.n_bytes for part in parts] == [20, 1, 30, 32, 1]
    assert [part.fraction for part in parts] == [1.0] * 5
    assert in_parts(source) == list(source.numbered())
    assert list(source.documents()) == [text for _, text in source.numbered()]
    numbers = [number for number, _ in source.numbered()]
    assert numbers[:2] == [0, 1]
    assert numbers[5] == numbers[4] + 1
    assert len(set(numbers)) == 7


def test_small_parts_hold_out_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpath.data.sources.files._TOGETHER", 1)
    for i in range(1000):
        (tmp_path / f"{i:04}.txt").write_text(f"document {i}")
    source, split = Files([str(tmp_path / "*.txt")]), Split(10)
    assert len(source.parts()) == 1000
    for region in ("validation", "test"):
        assert 70 < len(list(split.documents(source, region))) < 130


def test_a_limit_reads_in_one_part_and_holds_out_the_same(folder: Path) -> None:
    source = Files([str(folder / "**/*.txt")])
    limited = replace(source, max_documents=2)
    assert len(limited.parts()) == 1
    assert in_parts(limited) == list(source.numbered())[:2]


@pytest.fixture
def files_of_rows(tmp_path: Path) -> list[str]:
    for k in range(3):
        rows = [json.dumps({"text": f"file {k} row {i}"}) for i in range(4)]
        (tmp_path / f"{k}.jsonl").write_text("\n".join(rows) + "\n")
    return [str(tmp_path / f"{k}.jsonl") for k in range(3)]


def test_hub_parts_are_its_files(files_of_rows: list[str]) -> None:
    source = Hub("json", data_files=files_of_rows)
    assert len(source.parts()) == 3
    assert in_parts(source) == list(source.numbered())
    assert list(source.documents()) == [f"file {k} row {i}" for k in range(3) for i in range(4)]
    assert [number for number, _ in source.numbered()] == [number for number, _ in Files(files_of_rows).numbered()]


def test_hub_rows_without_text_are_skipped_or_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": null}\n{"text": "b"}\n')
    source = Hub("json", data_files=[str(tmp_path / "rows.jsonl")])
    with pytest.raises(UserError, match="row 2: field 'text' is NoneType"):
        list(source.documents())
    source = replace(source, bad_documents="skip")
    assert list(source.documents()) == ["a", "b"]
    assert source.skipped == 1


class Away:
    """A dataset whose Hub falls silent before some of its rows."""

    num_shards = 1
    failures: dict[int, list[Exception]]

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def shard(self, of: int, index: int) -> "Away":
        return self

    def skip(self, n: int) -> "Away":
        return Away(n)

    def __iter__(self) -> Iterator[dict[str, str]]:
        for i in range(self.start, 6):
            if Away.failures.get(i):
                raise Away.failures[i].pop()
            yield {"text": f"row {i}"}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    return waits


def away(monkeypatch: pytest.MonkeyPatch, opening: list[Exception], reading: dict[int, list[Exception]]) -> Hub:
    def load(self: Hub) -> Away:
        if opening:
            raise opening.pop()
        return Away()

    Away.failures = reading
    monkeypatch.setattr(Hub, "load", load)
    return Hub("someone/something", tries=3)


def test_a_hub_that_is_away_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, waits: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    gone = ConnectionResetError("gone")
    hub = away(monkeypatch, [ConnectionError("away"), TimeoutError()], {1: [gone, gone], 3: [gone]})
    assert list(hub.documents()) == [f"row {i}" for i in range(6)]
    assert waits == [1, 2, 1, 2, 1]  # each row that arrives starts the count anew
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert lines[1] == "someone/something: the Hub does not answer (away); try 3 of 3 in 2 s"


def test_a_hub_that_stays_away_is_one_line(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    message = "dataset 'someone/something': the Hub did not answer 3 times in a row: away"
    with pytest.raises(UserError, match=message):
        away(monkeypatch, [ConnectionError("away")] * 3, {}).documents()
    with pytest.raises(UserError, match=message):
        list(away(monkeypatch, [], {2: [ConnectionError("away")] * 3}).documents())
    assert waits == [1, 2, 1, 2]


def test_what_will_not_change_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    from huggingface_hub.errors import OfflineModeIsEnabled

    wrapped = ConnectionError("no file of it, OfflineModeIsEnabled")
    offline = OfflineModeIsEnabled("offline")
    for error in (FileNotFoundError("no such dataset"), offline, wrapped, ValueError("bad split")):
        with pytest.raises(UserError, match=f"'someone/something' cannot be read: {error}"):
            away(monkeypatch, [error], {}).documents()
    assert waits == []
