#!/usr/bin/env python
"""How fast `kvpath test` scores tokens, beside the model's bare forward pass on the same batches.

    scripts/bench_eval.py                                                # model/98m with attention/gqa
    scripts/bench_eval.py -c model/98m -c attention/kvpath_concat --context 8192 --batch-tokens 32768 --batches 20

In turns, round after round: `forward` gives the logits of batches that lie on the device, and nothing else; `sums` the
loss of each token in place of logits; `evaluation` is Lightning's test loop over text in files. The last line is JSON;
`ratio` is evaluation over forward in tokens per second, and `aim` what is hoped for.

Exit codes: 0, 2 for a wrong argument.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from kvpath import UserError, load_config
from kvpath.analysis.machine import DTYPES, QUIET, busy_cores
from kvpath.cli.running import quieten
from kvpath.data import Budget, Files, PackedText, TokenizerConfig
from kvpath.data.evaluations import EvaluatedText
from kvpath.training import LanguageModel

PIECES = ["model/98m", "attention/gqa"]
SMALL = ("n_layers=2", "d_model=32", "vocab_size=300", "d_ff=64")
PRECISION: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed"}


class Timed(pl.Callback):
    """Measures the test loop from its first batch to its last."""

    seconds = 0.0

    def on_test_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin."""
        self.seconds = -finished_at()

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End."""
        self.seconds += finished_at()


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; gives the exit code."""
    args = parse(argv)
    try:
        result = bench(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in ("forward", "sums", "evaluation"):
        print(f"{name}: {result[name]:,.0f} tokens/s")
    print(f"evaluation over forward: {result['ratio']:.3f} (hoped for: {result['aim']})")
    print(json.dumps(result))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--config", action="append", metavar="PIECE", help=f"the model ({' '.join(PIECES)})")
    parser.add_argument("--context", type=int, default=2048, help="tokens in a window (2048)")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens in a batch, whole windows (2048)")
    parser.add_argument("--batches", type=int, default=4, help="in each turn (4)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each has its turn (3)")
    parser.add_argument("--precision", choices=tuple(DTYPES), default="fp32", help="bf16 is autocast (fp32)")
    parser.add_argument("--small", action="store_true", help="a toy model and few tokens: a quick check")
    args = parser.parse_args(argv)
    if args.small:
        args.context, args.batch_tokens, args.batches, args.rounds = 32, 64, 3, 1
    for name in ("context", "batches", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be positive, got {getattr(args, name)}")
    if args.batch_tokens < args.context or args.batch_tokens % args.context:
        parser.error(f"--batch-tokens must be a multiple of --context {args.context}, got {args.batch_tokens}")
    return args


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Let each have its turns."""
    quieten()
    overrides = [f"--model.backbone.{change}" for change in SMALL] if args.small else []
    model = LanguageModel(load_config(*(args.config or PIECES), overrides=overrides).backbone)
    timed = Timed()
    trainer = pl.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        precision=PRECISION[args.precision],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[timed],
    )
    n_tokens = args.batches * args.batch_tokens
    seconds: dict[str, list[float]] = {"forward": [], "sums": [], "evaluation": []}
    busy = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVPATH_CACHE"] = folder
        data = text(Path(folder), args, n_tokens)
        trainer.test(model, data, verbose=False)  # which warms up, too
        device = trainer.strategy.root_device
        model.to(device).eval()
        batches = [{name: part.to(device) for name, part in batch.items()} for batch in data.test_dataloader()[0]]
        decoder = model.decoder

        def bare(run: Callable[[dict[str, torch.Tensor]], object]) -> float:
            autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")
            with torch.inference_mode(), autocast:
                start = finished_at()
                for batch in batches:
                    run(batch)
                return finished_at() - start

        for turn in range(-1, args.rounds):  # one turn to warm up
            busy.append(busy_cores())
            forward = bare(lambda batch: decoder(batch["tokens"]))
            sums = bare(lambda batch: decoder(batch["tokens"], batch["labels"]))
            trainer.test(model, data, verbose=False)
            model.to(device)
            if turn >= 0:
                for name, found in (("forward", forward), ("sums", sums), ("evaluation", timed.seconds)):
                    seconds[name].append(found)
    ratios = [bare / whole for bare, whole in zip(seconds["forward"], seconds["evaluation"], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "aim": 0.9,
        **{name: n_tokens / statistics.median(found) for name, found in seconds.items()},
        "context": args.context,
        "batch_tokens": args.batch_tokens,
        "batches": args.batches,
        "precision": args.precision,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "busy_cores": busy,
        "quiet": max(busy) <= QUIET,
    }


def text(folder: Path, args: argparse.Namespace, n_tokens: int) -> PackedText:
    """So many tokens of random letters, which a small tokenizer is trained on: models do not mind what they read."""
    choose = random.Random(0)
    for i in range(1 + n_tokens // 10_000):
        (folder / f"{i}.txt").write_text("".join(choose.choices("abcdefghij", k=20_000)), encoding="utf-8")
    source = Files([f"{folder}/*.txt"])
    return PackedText(
        source,
        TokenizerConfig("train", vocab_size=257),
        args.context,
        Budget(args.context, 1),
        evaluate={"random": EvaluatedText(source, limit_tokens=n_tokens)},
        eval_batch_tokens=args.batch_tokens,
    )


def finished_at() -> float:
    """The time when all that was begun on the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(main())
