"""A toy run on the command line: a small corpus, a model of two layers, and the command inside this process."""

import json
import random
from pathlib import Path
from typing import Any

import yaml

from kvpath.cli.main import main
from kvpath.training.metrics_file import read_metrics

WORDS = "key value path alpha delta of the owl naïve layer head state union fellow citizens 1,024".split()

STEPS = 6
TOKENS_PER_STEP = 64

TIMINGS = {"train/tokens_per_second", "train/mfu", "train/memory_gb"}
"""The only scalars that two equal runs differ in."""


def write_corpus(folder: Path) -> Path:
    """40 documents in one file."""
    choose = random.Random(0)
    documents = [" ".join(choose.choices(WORDS, k=40 + i)) for i in range(40)]
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    return path


def toy_config(corpus: Path, steps: int = STEPS) -> dict[str, Any]:
    """A whole configuration: `steps` steps of 4 x 16 tokens, validation after every third, no progress bar."""
    return {
        "model": {
            "backbone": {
                "vocab_size": 300,
                "d_model": 16,
                "n_layers": 2,
                "d_ff": 24,
                "max_seq_len": 64,
                "attention": {"class_path": "GQA", "init_args": {"n_heads": 2, "n_kv_heads": 1, "head_dim": 8}},
            },
            "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1},
        },
        "data": {
            "source": {"class_path": "Files", "init_args": {"files": [str(corpus)]}},
            "tokenizer": {"name": "train", "vocab_size": 300},
            "seq_len": 16,
            "holdout_every": 5,
            "budget": {"tokens": steps * TOKENS_PER_STEP, "global_batch_sequences": 4, "micro_batch": 2},
        },
        "every": {"log": "1 step", "validate": "3 steps", "save": "1000 steps"},
        "sample": {"tokens": 2},
        "peak_flops": 1e12,
        "trainer": {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "num_sanity_val_steps": 0},
    }


def write_config(folder: Path, name: str = "toy.yaml", **changes: Any) -> Path:
    """A piece in a file; changes of dotted keys with `__` for the dots go over the toy configuration."""
    values = toy_config(write_corpus(folder))
    for key, value in changes.items():
        *parents, last = key.split("__")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    path = folder / name
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def kvpath(*argv: str | Path) -> int:
    """The exit code of the command."""
    return main([str(argument) for argument in argv])


def metrics_of(run: Path, without: set[str] = TIMINGS) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what depends on the machine."""
    lines = read_metrics(run / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in without} for line in lines]
