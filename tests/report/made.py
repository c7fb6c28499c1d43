"""Run directories made up for tests: their files alone, nothing is trained."""

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

GQA: dict[str, Any] = {
    "class_path": "kvpath.attention.GQA",
    "init_args": {"n_heads": 2, "n_kv_heads": 1, "head_dim": 8},
}
CONCAT: dict[str, Any] = {
    "class_path": "kvpath.attention.KVPathConcat",
    "init_args": {"n_heads": 2, "n_kv_heads": 1, "head_dim": 12, "delta_dim": 4, "path_length": 2},
}
TOKENS = 10_000
BYTES = 45_000
PER_STEP = 256


def backbone(attention: dict[str, Any] = GQA, **changed: Any) -> dict[str, Any]:
    """A small model's section; both attentions store 32 elements, and d_ff makes parameters equal within 0.05%."""
    d_ff = [26, 25] if attention is CONCAT else 31
    sizes = {"vocab_size": 1024, "d_model": 16, "n_layers": 2, "d_ff": d_ff, "max_seq_len": 64}
    return {**sizes, "attention": attention, **changed}


def make_run(
    path: Path,
    attention: dict[str, Any] = GQA,
    seed: int = 0,
    perplexities: dict[tuple[str, int], float] | None = None,
    *,
    model: dict[str, Any] | None = None,
    seq_len: int = 64,
    per_step: int = PER_STEP,
    steps: int = 40,
    planned: int | None = 40,
    stream_hash: str | None = None,
    learning_rate: float = 1e-3,
    start_tokens: int | None = None,
    name: str | None = None,
    fingerprint: str | None = "aa",
    by_position: bool = True,
    recall: bool = False,
    stride: int | None = None,
    dtype: str = "bf16-mixed",
    logged: int = 40,
) -> Path:
    """A run directory; `planned` None leaves out its summary, `logged` is how many lines its metrics have."""
    path.mkdir(parents=True)
    config = {
        "seed_everything": seed,
        "trainer": {"precision": "bf16-mixed", "devices": 1},
        "model": {
            "backbone": model or backbone(attention),
            "optimizer": {"learning_rate": learning_rate, "warmup_steps": 4},
            "seed": seed,
        },
        "data": {
            "source": {"class_path": "kvpath.data.Files", "init_args": {"files": f"{path.parent}/text"}},
            "seq_len": seq_len,
            "budget": {"tokens": 1e4, "global_batch_sequences": None, "global_batch_tokens": per_step},
            "seed": seed,
            "start_tokens": start_tokens,
        },
        "name": name,
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    draw = random.Random(f"{path.name}{seed}")
    lines = []
    for index in range(1, logged + 1):
        step = max(1, index * steps // logged)
        loss = 2 + 4 * math.exp(-5 * index / logged) + draw.gauss(0, 0.05)
        lines.append({"step": step, "train/loss": loss, "data/stream_hash": stream_hash or f"{seed:016x}"})
        if index % max(1, logged // 8) == 0:
            lines.append({"step": step, "validation/loss": loss + 0.1})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if planned is not None:
        summary = {"name": name or path.name, "step": steps, "planned_steps": planned, "tokens": steps * per_step}
        summary["stream_hash"] = stream_hash or f"{seed:016x}"
        (path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    if perplexities:
        entries = [
            entry(corpus, context, value, steps, fingerprint, by_position, stride, dtype, name or path.name, seed)
            for (corpus, context), value in perplexities.items()
        ]
        (path / "perplexity.json").write_text(json.dumps(entries), encoding="utf-8")
    if recall:
        (path / "retrieval.json").write_text(json.dumps(retrieval(steps, seed, draw)), encoding="utf-8")
    return path


def entry(
    corpus: str,
    context: int,
    perplexity: float,
    step: int,
    fingerprint: str | None,
    by_position: bool,
    stride: int | None,
    dtype: str,
    run: str,
    seed: int,
) -> dict[str, Any]:
    """One object of perplexity.json."""
    nll = TOKENS * math.log(perplexity)
    values = {
        "format_version": 1,
        "run": run,
        "step": step,
        "seed": seed,
        "corpus": corpus,
        "split": "test",
        "context": context,
        "stride": stride or context,
        "tokens": TOKENS,
        "bytes": BYTES,
        "nll_sum": nll,
        "perplexity": perplexity,
        "bits_per_byte": nll / math.log(2) / BYTES,
        "dtype": dtype,
        "code_version": "0.1.0",
    }
    if fingerprint is not None:
        values["fingerprint"] = fingerprint + corpus[:2]
    if by_position:
        values["by_position"] = buckets(context, perplexity)
    return values


def buckets(context: int, perplexity: float) -> list[dict[str, Any]]:
    """Positions [0, 1), [1, 2), [2, 4), ... up to the context, which are easier to tell the later they come."""
    ends = [0, *(1 << power for power in range(context.bit_length()) if 1 << power < context), context]
    return [
        {"from": low, "to": high, "tokens": 10, "nll_sum": 10 * (math.log(perplexity) + 2 / (1 + low))}
        for low, high in zip(ends, ends[1:], strict=False)
    ]


def retrieval(step: int, seed: int, draw: random.Random) -> list[dict[str, Any]]:
    """retrieval.json: a passkey at five depths."""
    return [
        {
            "format_version": 1,
            "run": "x",
            "step": step,
            "seed": seed,
            "task": "passkey",
            "context": 64,
            "depth": depth,
            "n_keys": None,
            "correct": (correct := 60 + draw.randrange(40)),
            "asked": 100,
            "accuracy": correct / 100,
            "dtype": "bf16-mixed",
            "fingerprint": "cc",
            "code_version": "0.1.0",
        }
        for depth in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
