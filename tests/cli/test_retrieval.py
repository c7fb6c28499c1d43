"""Recall on the command line: learned, tested by a plain pass and from the cache, resumed, reported and refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpath.report.results import read_retrieval
from tests.runs import kvpath, metrics_of

STEPS, TOKENS_PER_STEP = 250, 64 * 12


def recall_piece(folder: Path, **of_source: Any) -> Path:
    """A model of two layers, and up to four of eight keys."""
    values = {
        "model": {
            "backbone": {
                "d_model": 64,
                "n_layers": 2,
                "d_ff": 128,
                "vocab_size": 18,
                "max_seq_len": 64,
                "init_std": 0.05,
                "attention": {"class_path": "GQA", "init_args": {"n_heads": 2, "n_kv_heads": 2, "head_dim": 32}},
            },
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 20},
        },
        "data": {
            "source": {
                "class_path": "Recall",
                "init_args": {"n_keys": [2, 4], "keys": 8, "values": 8, "eval_examples": 50, **of_source},
            },
            "seq_len": 12,
            "budget": {"tokens": STEPS * TOKENS_PER_STEP, "global_batch_sequences": 64, "micro_batch": 64},
        },
        "every": {"log": "1 step", "validate": "1000 steps", "save": "1000 steps"},
        "sample": {"tokens": 2},
        "peak_flops": 1e12,
        "trainer": {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "num_sanity_val_steps": 0},
    }
    path = folder / "recall.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def entries_of(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "retrieval.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recall")
    piece = recall_piece(folder)
    assert kvpath("fit", "-c=data/recall", "-c", piece, "--run", folder / "run") == 0
    assert kvpath("test", "--ckpt_path", folder / "run") == 0
    assert kvpath("test", "--ckpt_path", folder / "run", "--data.eval_through_cache=true") == 0
    return folder / "run"


def test_a_small_model_learns_it_and_answers_the_same_from_the_cache(learned: Path) -> None:
    entries = entries_of(learned)
    assert [(entry["task"], entry["n_keys"], entry["asked"]) for entry in entries] == [
        ("recall", 2, 100),
        ("recall", 4, 200),
        ("recall, through the cache", 2, 100),
        ("recall, through the cache", 4, 200),
    ]
    # one of eight values is right by chance, and one of those that stand there in a quarter to a half of the cases
    assert all(entry["accuracy"] == entry["correct"] / entry["asked"] > 0.9 for entry in entries)
    assert [entry["correct"] for entry in entries[:2]] == [entry["correct"] for entry in entries[2:]]
    assert [entry["fingerprint"] for entry in entries[:2]] == [entry["fingerprint"] for entry in entries[2:]]
    assert not (learned / "perplexity.json").exists()
    assert not list(learned.glob("*.partial"))


def test_a_report_shows_it(learned: Path, tmp_path: Path) -> None:
    assert [(entry.task, entry.n_keys, entry.depth) for entry in read_retrieval(learned)[:2]] == [
        ("recall", 2, None),
        ("recall", 4, None),
    ]
    assert kvpath("report", learned, "--output", tmp_path / "report") == 0
    texts = [path.read_text(encoding="utf-8") for path in (tmp_path / "report").rglob("*.md")]
    assert any("Recall: recall at" in text and "4 keys" in text for text in texts)


def test_a_repeated_test_replaces_its_entries(learned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = entries_of(learned)
    assert kvpath("test", "--ckpt_path", learned) == 0
    assert sorted(map(str, entries_of(learned))) == sorted(map(str, before))
    assert "recall n_keys=4" in capsys.readouterr().out


def test_a_resumed_run_sees_what_a_whole_one_does(tmp_path: Path) -> None:
    flags = ("-c=data/recall", "-c", recall_piece(tmp_path), f"--data.budget.tokens={6 * TOKENS_PER_STEP}")
    assert kvpath("fit", *flags, "--run", tmp_path / "whole") == 0
    assert kvpath("fit", *flags, "--run", tmp_path / "two", "--trainer.max_steps=3") == 0
    assert kvpath("fit", *flags, "--run", tmp_path / "two", "--ckpt_path=last", "--data.budget.micro_batch=16") == 0
    summaries = [json.loads((tmp_path / run / "summary.json").read_text()) for run in ("whole", "two")]
    assert summaries[0]["stream_hash"] == summaries[1]["stream_hash"] is not None
    losses = [
        [line["train/loss"] for line in metrics_of(tmp_path / run) if "train/loss" in line] for run in ("whole", "two")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_model_of_text_is_asked_for_a_passkey(trained: Path, tmp_path: Path) -> None:
    flags = ("--data.eval_contexts=[256]", "--output", tmp_path / "found.json")
    assert kvpath("test", "--ckpt_path", trained, "-c=eval/passkey", *flags) == 0
    entries = json.loads((tmp_path / "found.json").read_text())
    assert [(entry["task"], entry["depth"], entry["asked"]) for entry in entries] == [
        ("passkey", depth, 50) for depth in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("--data.seq_len=11", "recall: n_keys 4 need sequences of 12 tokens, got 11"),
        ("--data.source.keys=3", "keys must be at least the largest of n_keys [2, 4], got 3"),
        ("--data.holdout_every=5", "holdout_every must be null with source recall, got 5"),
        ("--model.backbone.vocab_size=17", "model.backbone.vocab_size must be at least the tokenizer's 18, got 17"),
    ],
)
def test_what_does_not_fit_is_one_line(
    flag: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvpath("fit", "-c=data/recall", "-c", recall_piece(tmp_path), flag, "--run", tmp_path / "run") == 2
    assert problem in capsys.readouterr().err
