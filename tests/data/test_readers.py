"""Each format reads back what was written; each kind of damage is named with where it is."""

import gzip
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from kvpath.data.readers import Reading, file_format, read_texts
from kvpath.errors import UserError

TEXTS = ["first document\n", "zweites Döküment 🦉", "\x00 odd \u2028 characters"]


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)).encode()


def parquet(texts: list[str], tmp_path: Path) -> bytes:
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "plain.parquet", row_group_size=2)
    return (tmp_path / "plain.parquet").read_bytes()


def compress(content: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(content)
    return pyarrow.compress(content, codec="zstd", asbytes=True) if suffix == ".zst" else content


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_every_format_reads_back(tmp_path: Path, suffix: str) -> None:
    contents = {".txt": TEXTS[1].encode(), ".jsonl": jsonl(TEXTS), ".parquet": parquet(TEXTS, tmp_path)}
    for kind, content in contents.items():
        path = tmp_path / f"file{kind}{suffix}"
        path.write_bytes(compress(content, suffix))
        assert file_format(path) == kind
        assert list(read_texts(path, "text")) == (TEXTS[1:2] if kind == ".txt" else TEXTS)


def test_several_zstd_frames_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "frames.jsonl.zst"
    path.write_bytes(compress(jsonl(TEXTS[:1]), ".zst") + compress(jsonl(TEXTS[1:]), ".zst"))
    assert list(read_texts(path, "text")) == TEXTS


def test_blank_lines_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(b"\n" + jsonl(TEXTS) + b"  \n")
    assert list(read_texts(path, "text")) == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good \xff bad", "a.txt is not UTF-8: byte 5 is 0xff"),
        ("a.jsonl", jsonl(["ok"]) + b'{"text": "\xe9"}\n', "a.jsonl is not UTF-8: byte 34 is 0xe9"),
        ("a.jsonl", jsonl(["ok"]) + b"{oops\n", "a.jsonl:2: not JSON: .* at column 2"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: a JSON object is wanted, this is list"),
        ("a.jsonl", b'{"body": "x", "id": 1}\n', "a.jsonl:1: no field 'text' .*; the fields are body, id"),
        ("a.jsonl", jsonl(["ok"]) + b'{"text": 7}\n', "a.jsonl:2: field 'text' is int, not a string"),
        ("a.jsonl", b'{"text": "x\\ud800"}\n', "a.jsonl:1: half a surrogate pair at character 1"),
        ("a.jsonl", b"\n\n", "a.jsonl is empty"),
        ("a.txt.gz", gzip.compress(b"", mtime=0), "a.txt.gz is empty"),
        ("a.txt.gz", gzip.compress(b"cut off" * 100, mtime=0)[:-9], "a.txt.gz is damaged"),
        ("a.txt.gz", b"never was gzip", "a.txt.gz is damaged"),
        ("a.txt.zst", b"never was zstd", "a.txt.zst is damaged"),
        ("a.parquet", b"never was parquet", "a.parquet is not a parquet file"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_texts(path, "text"))


def test_parquet_without_the_field_or_with_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x", None], "id": [1, 2]}), path)
    with pytest.raises(UserError, match=r"a.parquet: no field 'text' \(text_field\); the fields are body, id"):
        list(read_texts(path, "text"))
    with pytest.raises(UserError, match="a.parquet, row 2: field 'body' is NoneType, not a string"):
        list(read_texts(path, "body"))


@pytest.mark.parametrize(
    ("name", "content", "kept", "skipped"),
    [
        ("a.txt", b"good \xff bad", [], 1),
        ("a.jsonl", b'{"text": "\xe9"}\n' + jsonl(["ok"]) + b"{oops\n[1]\n" + jsonl(["also"]), ["ok", "also"], 3),
        ("a.jsonl", b'{"text": 7}\n{"body": "x"}\n{"text": "x\\ud800"}\n', [], 3),
    ],
)
def test_bad_documents_are_counted(tmp_path: Path, name: str, content: bytes, kept: list[str], skipped: int) -> None:
    (tmp_path / name).write_bytes(content)
    reading = Reading(skip_bad=True)
    assert list(read_texts(tmp_path / name, "text", reading)) == kept
    assert reading.skipped == skipped


def test_holes_of_parquet_are_skipped_but_not_a_missing_column(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x", None, "y"]}), path)
    reading = Reading(skip_bad=True)
    assert list(read_texts(path, "body", reading)) == ["x", "y"]
    assert reading.skipped == 1
    with pytest.raises(UserError, match="no field 'text'"):
        list(read_texts(path, "text", reading))


def test_damaged_files_are_refused_even_where_documents_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(b"never was gzip")
    with pytest.raises(UserError, match="is damaged"):
        list(read_texts(tmp_path / "a.txt.gz", "text", Reading(skip_bad=True)))


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_progress_goes_from_0_to_1(tmp_path: Path, suffix: str) -> None:
    draw = random.Random(0)
    texts = ["".join(chr(draw.randrange(33, 0x2FFF)) for _ in range(400)) for _ in range(2000)]
    path = tmp_path / f"file.{suffix}"
    content = parquet(texts, tmp_path) if suffix == "parquet" else jsonl(texts)
    path.write_bytes(compress(content, path.suffix))
    reading = Reading()
    assert reading.fraction == 0
    read = read_texts(path, "text", reading)
    fractions = [reading.fraction for _ in read]
    assert fractions == sorted(fractions)
    assert 0.4 < fractions[999] < 0.7
    assert fractions[-1] > 0.99
