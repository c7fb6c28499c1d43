"""Mixtures keep to their weights at every point; filters and mixtures hold out what their sources do."""

import json
from pathlib import Path
from typing import Literal

import pytest
from jsonargparse import ArgumentParser, set_parsing_settings

from kvpath.data.regions import Split
from kvpath.data.sources import Files, Filtered, Mixture, Source
from kvpath.errors import UserError


def files(tmp_path: Path, name: str, texts: list[str]) -> Files:
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Files([str(path)])


@pytest.fixture
def long(tmp_path: Path) -> Files:
    return files(tmp_path, "long", [f"L{i}" + "l" * (i % 50) for i in range(300)])


@pytest.fixture
def short(tmp_path: Path) -> Files:
    return files(tmp_path, "short", [f"S{i}" + "s" * (i % 30) for i in range(100)])


def test_shares_of_text_follow_the_weights_at_every_point(long: Files, short: Files) -> None:
    mixture = Mixture([long, short], [3, 1])
    characters = {"L": 0, "S": 0}
    for text in mixture.documents():
        characters[text[0]] += len(text) + 1
        assert abs(characters["L"] - 3 * characters["S"]) <= 3 * 60
    assert list(mixture.documents()) == list(mixture.documents())


@pytest.mark.parametrize(("when", "n_long", "n_short"), [("stop", None, 100), ("continue", 300, 100)])
def test_what_happens_when_one_ends(
    long: Files, short: Files, when: Literal["stop", "continue"], n_long: int | None, n_short: int
) -> None:
    texts = list(Mixture([long, short], [1, 1], when).documents())
    assert sum(text[0] == "S" for text in texts) == n_short
    assert len(set(texts)) == len(texts)
    if n_long is not None:
        assert sum(text[0] == "L" for text in texts) == n_long


def test_restarting_ends_when_each_has_ended(long: Files, short: Files) -> None:
    texts = list(Mixture([long, short], [1, 1], "restart").documents())
    assert {text for text in texts if text[0] == "L"} == set(long.documents())
    assert sum(text[0] == "S" for text in texts) > 200
    empty = Filtered(short, min_characters=1000)
    assert len(list(Mixture([long, empty], [1, 1], "restart").documents())) == 300


def test_what_is_held_out_of_a_source_is_so_in_mixtures_and_filters(long: Files, short: Files) -> None:
    split = Split(7)
    held_out = {*split.documents(long, "validation"), *split.documents(short, "validation")}
    mixture = Mixture([long, short], [1, 1], "restart")
    assert not held_out & set(split.documents(mixture, "train"))
    assert set(split.documents(mixture, "validation")) == held_out
    filtered = Filtered(long, min_characters=20)
    assert list(split.documents(filtered, "validation")) == [
        text for text in split.documents(long, "validation") if len(text) >= 20
    ]


def test_filters(tmp_path: Path) -> None:
    source = files(tmp_path, "texts", ["", "short", "a number: 12", "x" * 40, "secret 7"])
    assert list(Filtered(source, min_characters=1, max_characters=20).documents())[0] == "short"
    assert list(Filtered(source, matches=r"\d", rejects="secret").documents()) == ["a number: 12"]
    assert list(Filtered(source, max_characters=20).documents()) == ["", "short", "a number: 12", "secret 7"]
    filtered = Filtered(source, min_characters=6)
    assert [pair for part in filtered.parts() for pair in part.numbered()] == list(filtered.numbered())
    assert [number for number, _ in filtered.numbered()] == [2, 3, 4]


def test_skipped_documents_are_counted_through(tmp_path: Path, short: Files) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\nnot JSON\n')
    source = Filtered(Mixture([Files([str(bad)], bad_documents="skip"), short], [1, 1], "continue"), max_characters=9)
    assert len(list(source.documents())) > 0
    assert source.skipped == 1


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1], r"weights must be one for each of the 2 sources, got \[1\]"),
        ([1, 0], r"weights\[1\] must be positive, got 0"),
        ([float("nan"), 1], r"weights\[0\] must be positive, got nan"),
    ],
)
def test_weights_that_cannot_be(long: Files, short: Files, weights: list[float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Mixture([long, short], weights)


def test_all_mistakes_of_a_filter_come_together(long: Files) -> None:
    with pytest.raises(
        UserError, match=r"max_characters must be .* 5, got 3; matches is no regular expression: .*'\('"
    ):
        Filtered(long, min_characters=5, max_characters=3, matches="(")


def test_fingerprints_change_with_what_decides_the_documents(long: Files, short: Files) -> None:
    made = [
        Mixture([long, short], [1, 1]),
        Mixture([short, long], [1, 1]),
        Mixture([long, short], [1, 2]),
        Mixture([long, short], [1, 1], "restart"),
        Filtered(long),
        Filtered(long, min_characters=1),
        Filtered(long, rejects="x"),
        Filtered(short),
    ]
    assert len({source.fingerprint() for source in made}) == len(made)


def test_they_are_written_in_yaml(long: Files, short: Files) -> None:
    set_parsing_settings(subclasses_enabled=[Source])
    parser = ArgumentParser()
    parser.add_argument("--source", type=Source)
    yaml = f"""
source:
  class_path: Filtered
  init_args:
    min_characters: 3
    source:
      class_path: Mixture
      init_args:
        sources:
        - {{class_path: Files, init_args: {{files: [{long.files[0]}]}}}}
        - {{class_path: Files, init_args: {{files: [{short.files[0]}]}}}}
        weights: [3, 1]
        when_one_ends: continue
"""
    parsed = parser.parse_string(yaml)
    again = parser.instantiate_classes(parser.parse_string(parser.dump(parsed))).source
    assert again == Filtered(Mixture([long, short], [3, 1], "continue"), min_characters=3)
