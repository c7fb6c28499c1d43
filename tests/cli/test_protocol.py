"""`kvpath test` on texts by name: what it finds, how it goes on after an interruption, and what it refuses."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from kvpath.data import TokenizerConfig
from kvpath.data.sources import Hub
from kvpath.model import Decoder
from kvpath.training import LanguageModel
from tests.runs import WORDS, kvpath

NAMES = ("books", "notes")
TOKENS = 120


def files_piece(folder: Path, **changes: Any) -> Path:
    """A piece that evaluates on two parquet files, under names of its own."""
    choose = random.Random(1)
    for name in NAMES:
        texts = [" ".join(choose.choices(WORDS, k=50)) for _ in range(8)]
        pq.write_table(pa.table({"text": texts}), folder / f"{name}-test.parquet")
    evaluate = {
        name: {
            "source": {"class_path": "Files", "init_args": {"files": [str(folder / f"{name}-test.parquet")]}},
            "limit_tokens": TOKENS,
        }
        for name in NAMES
    }
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"data": {"eval_contexts": [8, 32], "evaluate": evaluate, **changes}}))
    return path


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return files_piece(tmp_path_factory.mktemp("mine"))


@pytest.fixture(scope="module")
def regions(trained: Path, mine: Path) -> dict[str, Tensor]:
    """The tokens of both texts, read without the package's data."""
    tokenizer = TokenizerConfig(str(trained / "tokenizer.json")).load()
    found = {}
    for name in NAMES:
        texts = pq.read_table(mine.parent / f"{name}-test.parquet")["text"].to_pylist()
        found[name] = torch.tensor([i for text in texts for i in (*tokenizer.encode(text), tokenizer.end_of_text)])
    return {name: tokens[: TOKENS + 1] for name, tokens in found.items()}


def measured(run: Path, out: Path, *flags: str | Path) -> list[dict[str, Any]]:
    assert kvpath("test", "--ckpt_path", run, "--output", out, *flags) == 0
    entries: list[dict[str, Any]] = json.loads(out.read_text())
    return entries


@pytest.mark.parametrize("stride", [None, 3, 8])
def test_perplexity_is_what_brute_force_finds(
    trained: Path, mine: Path, decoder: Decoder, regions: dict[str, Tensor], stride: int | None, tmp_path: Path
) -> None:
    stated = "null" if stride is None else str(stride)
    entries = measured(trained, tmp_path / "out.json", "-c", mine, f"--data.eval_stride={stated}")
    assert [(entry["corpus"], entry["context"]) for entry in entries] == [(n, c) for n in NAMES for c in (8, 32)]
    for entry in entries:
        tokens, context = regions[entry["corpus"]], entry["context"]
        step = stride or context
        nll = torch.zeros(context, dtype=torch.float64)
        counts = torch.zeros(context, dtype=torch.int64)
        for label in range(1, len(tokens)):
            # the first window that holds it
            start = 0 if label <= context else -(-(label - context) // step) * step
            with torch.no_grad():
                logits = decoder(tokens[None, start:label])[0, -1]
            place = label - 1 - start
            nll[place] -= logits.log_softmax(0)[tokens[label]]
            counts[place] += 1
        assert (entry["stride"], entry["tokens"]) == (step, TOKENS)
        assert entry["nll_sum"] == pytest.approx(float(nll.sum()), rel=1e-6)
        assert entry["perplexity"] == pytest.approx(float((nll.sum() / TOKENS).exp()), rel=1e-5)
        buckets = entry["by_position"]
        assert [bucket["from"] for bucket in buckets] == [0, 1, 2, 4, 8, 16][: len(buckets)]
        assert buckets[-1]["to"] == context
        for bucket in buckets:
            places = slice(bucket["from"], bucket["to"])
            assert bucket["tokens"] == int(counts[places].sum())
            assert bucket["nll_sum"] == pytest.approx(float(nll[places].sum()), rel=1e-6)


def test_perplexity_is_what_transformers_finds(
    trained: Path, mine: Path, decoder: Decoder, regions: dict[str, Tensor], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    from kvpath.interop.llama import llama_from

    llama = llama_from(decoder).eval()
    for entry in measured(trained, tmp_path / "out.json", "-c", mine):
        tokens, context = regions[entry["corpus"]], entry["context"]
        nll = 0.0
        for start in range(0, TOKENS, context):
            window = tokens[start : start + context + 1]
            with torch.no_grad():
                nll += float(F.cross_entropy(llama(window[None, :-1]).logits[0], window[1:], reduction="sum"))
        assert entry["nll_sum"] == pytest.approx(nll, rel=1e-6)


def test_every_model_and_context_reads_the_same(trained: Path, toy: Path, mine: Path, tmp_path: Path) -> None:
    other = ["--model.backbone.attention.n_kv_heads=2", "--model.seed=1"]
    assert kvpath("fit", "-c", toy, "--run", tmp_path / "other", *other) == 0
    entries = measured(trained, tmp_path / "a.json", "-c", mine)
    entries += measured(tmp_path / "other", tmp_path / "b.json", "-c", mine)
    entries += measured(trained, tmp_path / "c.json", "-c", mine, "--data.eval_stride=4", "--data.eval_batch_tokens=50")
    for name in NAMES:
        same = [entry for entry in entries if entry["corpus"] == name]
        assert len({entry["fingerprint"] for entry in same}) == 1
        assert {(entry["tokens"], entry["bytes"]) for entry in same} == {(TOKENS, same[0]["bytes"])}
        assert len({entry["nll_sum"] for entry in same}) == 6
    assert len({entry["fingerprint"] for entry in entries}) == 2


class Interruption(Exception):
    """Stands for whatever ends the process."""


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The loader of each batch that is scored; as many as `stop_after` says, and then an `Interruption`."""
    loaders: list[int] = []
    score = LanguageModel._score

    def counted(self: LanguageModel, batch: Any, loader: int) -> None:
        if len(loaders) == stop_after[0]:
            raise Interruption
        loaders.append(loader)
        score(self, batch, loader)

    monkeypatch.setattr(LanguageModel, "_score", counted)
    yield loaders
    stop_after[0] = None


stop_after: list[int | None] = [None]

FLAGS = ["--data.eval_batch_tokens=64"]
"""Two batches a loader."""


def interrupted(run: Path, out: Path, mine: Path, scored: list[int]) -> None:
    """An evaluation that ends within its third loader."""
    stop_after[0] = len(scored) + 5
    with pytest.raises(Interruption):
        kvpath("test", "--ckpt_path", run, "--output", out, "-c", mine, *FLAGS)
    stop_after[0] = None


def test_an_interrupted_evaluation_goes_on(
    trained: Path, mine: Path, tmp_path: Path, scored: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = measured(trained, tmp_path / "whole.json", "-c", mine, *FLAGS)
    assert scored == [0, 0, 1, 1, 2, 2, 3, 3]
    out, partial = tmp_path / "out.json", tmp_path / "out.json.partial"
    scored.clear()
    interrupted(trained, out, mine, scored)
    assert json.loads(out.read_text()) == whole[:2]
    assert partial.exists()
    scored.clear()
    capsys.readouterr()
    assert measured(trained, out, "-c", mine, *FLAGS) == whole
    said = capsys.readouterr()
    assert scored == [0, 0, 1, 1]
    assert said.err.splitlines()[:2] == [f"books at {context}: done before the interruption" for context in (8, 32)]
    assert "(3 of 4)" in said.err
    assert [line.split()[:2] for line in said.out.splitlines()[1:]] == [[n, c] for n in NAMES for c in ("8", "32")]
    assert not partial.exists()
    scored.clear()
    assert measured(trained, out, "-c", mine, *FLAGS) == whole
    assert len(scored) == 8  # a whole one is done anew


@pytest.mark.parametrize(
    "change",
    [
        "weights",
        "model",
        "results",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("dtype", "text", "batches")),
    ],
)
def test_what_is_of_something_else_is_not_taken_over(
    trained: Path, tmp_path: Path, scored: list[int], change: str
) -> None:
    run, out = tmp_path / "run", tmp_path / "out.json"
    shutil.copytree(trained, run)
    mine = files_piece(tmp_path)
    interrupted(run, out, mine, scored)
    scored.clear()
    flags = {
        "model": ["--model.backbone.rope_base=5e5"],
        "dtype": ["--trainer.precision=64-true"],
        "text": [f"--data.evaluate.{name}.limit_tokens={TOKENS - 1}" for name in NAMES],
        "batches": ["--trainer.limit_test_batches=1"],
    }.get(change, [])
    if change == "weights":
        shutil.copyfile(trained / "checkpoints" / "last.ckpt", run / "checkpoints" / "last.ckpt")
    if change == "results":
        out.unlink()
    measured(run, out, "-c", mine, *FLAGS, *flags)
    assert sorted(set(scored)) == [0, 1, 2, 3]


def test_another_stride_or_text_adds_and_the_same_replaces(trained: Path, mine: Path, tmp_path: Path) -> None:
    out, one = tmp_path / "out.json", ["-c", mine, "--data.eval_contexts=[8]"]
    assert len(measured(trained, out, *one)) == 2
    assert len(measured(trained, out, *one, "--data.eval_stride=4")) == 4
    assert len(measured(trained, out, *one, "--data.evaluate.books.limit_tokens=50")) == 5
    old = json.loads(out.read_text())
    for entry in old:
        del entry["fingerprint"]  # as they once were
    out.write_text(json.dumps(old))
    entries = measured(trained, out, *one)
    assert [entry["corpus"] for entry in entries if "fingerprint" in entry] == list(NAMES)
    assert [entry["stride"] for entry in entries if "fingerprint" not in entry] == [4, 4]


def test_a_run_on_its_own_region_has_fingerprint_and_positions(trained: Path, tmp_path: Path) -> None:
    (entry,) = measured(trained, tmp_path / "out.json")
    assert len(bytes.fromhex(entry["fingerprint"])) == 32
    assert sum(bucket["tokens"] for bucket in entry["by_position"]) == entry["tokens"]
    assert sum(bucket["nll_sum"] for bucket in entry["by_position"]) == pytest.approx(entry["nll_sum"])


# What is refused ------------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], run: Path, *flags: str | Path) -> str:
    """The one line that says why."""
    capsys.readouterr()
    assert kvpath("test", "--ckpt_path", run, *flags) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kvpath: error: ")]
    return line.removeprefix("kvpath: error: ")


def test_bad_input_is_one_line(trained: Path, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--output", tmp_path / "out.json"]
    argv = [trained, "-c", mine, *out]
    found = refused(capsys, *argv, "--data.eval_contexts=[500]")
    assert found.startswith(f"books, test: {TOKENS} tokens to score are fewer than one window of 500; state shorter")
    assert "; notes, test: " in found
    found = refused(capsys, *argv, "--data.tokenizer.name=train", "--data.tokenizer.vocab_size=299")
    assert found.startswith("data.tokenizer 'train' is not the one that the checkpoint was trained with; state its")
    assert "eval_stride must be from 1 to the shortest" in refused(capsys, *argv, "--data.eval_stride=9")
    (tmp_path / "out.json").write_text('{"a": 1}')
    assert "out.json is not a list of results; move it away" in refused(capsys, *argv)
    (tmp_path / "out.json").unlink()
    (tmp_path / "lost.yaml").write_text(mine.read_text().replace("notes-test.parquet", "nowhere.parquet"))
    assert refused(capsys, trained, "-c", tmp_path / "lost.yaml", *out).startswith("data.evaluate.notes: files: ")
    (tmp_path / "typo.yaml").write_text(mine.read_text().replace("limit_tokens", "limit_token"))
    assert "limit_token" in refused(capsys, trained, "-c", tmp_path / "typo.yaml", *out)
    assert not list(tmp_path.glob("out.json*"))


def test_a_text_that_the_weights_were_trained_on_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = yaml.safe_load((trained / "config.yaml").read_text())["data"]["source"]
    for holdout, code in ((None, 2), (4, 2), (5, 0)):
        piece = tmp_path / f"{holdout}.yaml"
        piece.write_text(yaml.safe_dump({"data": {"evaluate": {"own": {"source": source, "holdout_every": holdout}}}}))
        argv = ["--ckpt_path", trained, "--output", tmp_path / "out.json", "-c", piece]
        assert kvpath("test", *argv) == code
        said = capsys.readouterr().err
        wrong = f"data.evaluate.own: holdout_every was 5 when the weights were trained and is {holdout}: that would"
        assert (wrong in said) == (code == 2)


def test_a_corpus_that_cannot_be_reached_is_named(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(hub: Hub) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(Hub, "load", away)
    shorter = [f"--data.evaluate.{name}.source.tries=1" for name in ("c4", "fineweb_edu", "wikipedia", "pg19")]
    found = refused(capsys, trained, "-c", "eval/paper", *shorter, "--output", tmp_path / "out.json")
    assert found == (
        "data.evaluate.c4: dataset 'allenai/c4/en': the Hub did not answer 1 times in a row: no route to host"
    )


def test_an_unfinished_run_and_a_context_beyond_training_are_said(
    trained: Path, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "summary.json").unlink()
    measured(run, tmp_path / "out.json", "-c", mine, "--model.backbone.max_seq_len=16")
    said = capsys.readouterr().err
    assert f"warning: {run} is unfinished: these are its weights of step 6" in said
    assert "warning: data.eval_contexts 32: longer than the max_seq_len=16" in said
    capsys.readouterr()
    measured(trained, tmp_path / "out.json", "-c", mine)
    assert "warning" not in capsys.readouterr().err
