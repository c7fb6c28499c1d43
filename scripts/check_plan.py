#!/usr/bin/env python
"""What `kvpath plan` says of memory, beside what training really holds: models of 1 GB of weights, on CPU processes.

    scripts/check_plan.py [--only WORD ...] [--small]

Each case trains two steps, on one or two ranks, with all tensors that are made counted as long as they live; the second
step counts. Nothing of the plan was fitted to these cases. The last line is JSON.

Exit codes: 0, 1 if a plan is off by more than a tenth.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from kvpath import load_config
from kvpath.analysis.audit import count_parameters, on_meta
from kvpath.analysis.live_bytes import LiveBytes
from kvpath.analysis.run_plan import memory_of
from kvpath.analysis.sharing import Memory, Sharing
from kvpath.analysis.tables import table
from kvpath.model import BackboneConfig
from kvpath.training import LanguageModel, OptimizerConfig

TOLERANCE = 0.1

LARGE = ("vocab_size=8192", "d_model=1024", "n_layers=16", "d_ff=4352")
WIDE = ("vocab_size=16384", "d_model=1536", "n_layers=8", "d_ff=6144")
DEEP = ("vocab_size=4096", "d_model=768", "n_layers=32", "d_ff=2816")
NARROW = ("vocab_size=12288", "d_model=640", "n_layers=10", "d_ff=1792")
SLIM = ("vocab_size=6144", "d_model=448", "n_layers=14", "d_ff=1216")
SHORT = ("vocab_size=24576", "d_model=896", "n_layers=5", "d_ff=2496")
SMALL = ("vocab_size=64", "d_model=32", "n_layers=4", "d_ff=64")


@dataclass(frozen=True)
class Case:
    """One model, trained in one way."""

    attention: str
    shape: tuple[str, ...]
    ranks: int
    stage: int
    precision: str
    micro_batch: int
    seq_len: int
    accumulation: int = 1
    checkpointing: bool = False
    bucket_elements: int = 20_000_000
    offload: tuple[str, ...] = ()
    """Of optimizer, parameters: what lies in the memory of the host."""

    @property
    def name(self) -> str:
        whole = "DDP" if self.ranks > 1 else "single"
        how = f"ZeRO {self.stage}{' offload' * bool(self.offload)}" if self.stage else whole
        blocks = "again" if self.checkpointing else "kept"
        step = f"{self.accumulation} x {self.micro_batch} x {self.seq_len}"
        return f"{self.attention} {how} {self.precision} {step} {blocks}"

    def config(self, small: bool) -> BackboneConfig:
        """The model."""
        overrides = [f"--model.backbone.{change}" for change in (SMALL if small else self.shape)]
        return load_config("model/98m", f"attention/{self.attention}", overrides=overrides).backbone

    @property
    def sharing(self) -> Sharing:
        """How the ranks share it out."""
        return Sharing(self.ranks, self.stage, self.precision, **self.fields)

    @property
    def fields(self) -> dict[str, Any]:
        """Of the strategy, beside its stage."""
        return {"bucket_elements": self.bucket_elements, **{f"offload_{what}": True for what in self.offload}}


CASES = (
    Case("gqa", LARGE, 1, 0, "32-true", 2, 384),
    Case("kvpath_concat", WIDE, 1, 0, "32-true", 1, 1024, checkpointing=True),
    Case("kvpath_residual", DEEP, 1, 0, "32-true", 1, 256, accumulation=2),
    Case("mla", LARGE, 1, 0, "bf16-mixed", 1, 96),
    Case("kvpath_rolling", LARGE, 2, 0, "32-true", 1, 384),
    Case("cla", WIDE, 2, 1, "32-true", 2, 192),
    Case("mqa", DEEP, 2, 1, "32-true", 1, 256, accumulation=2),
    Case("gqa", DEEP, 2, 2, "32-true", 1, 512),
    Case("kvpath_mla", LARGE, 2, 2, "32-true", 1, 320, accumulation=2, checkpointing=True),
    Case("kvpath_concat", DEEP, 2, 2, "bf16-mixed", 1, 48),
    Case("kvpath_concat", LARGE, 2, 3, "32-true", 1, 384),
    Case("mha", WIDE, 2, 3, "32-true", 2, 256, checkpointing=True),
    # Activations are most of these.
    Case("gqa", NARROW, 1, 0, "32-true", 2, 2048),
    Case("gqa", SLIM, 1, 0, "32-true", 3, 4096, checkpointing=True),
    Case("kvpath_concat", SLIM, 1, 0, "32-true", 1, 3072),
    Case("kvpath_mla", SLIM, 1, 0, "32-true", 2, 2560),
    Case("kvpath_residual", SHORT, 1, 0, "bf16-mixed", 3, 2048),
    Case("kvpath_rolling", SLIM, 2, 0, "bf16-mixed", 1, 2304),
    Case("gqa", SHORT, 2, 0, "bf16-mixed", 1, 48),
    Case("mla", NARROW, 2, 1, "bf16-mixed", 1, 3584),
    Case("gqa", NARROW, 2, 2, "bf16-mixed", 1, 3328),
    Case("kvpath_concat", SLIM, 2, 2, "bf16-mixed", 1, 2176, accumulation=2),
    Case("kvpath_concat", SHORT, 2, 2, "bf16-mixed", 1, 2816, offload=("optimizer",)),
    Case("kvpath_residual", NARROW, 2, 3, "bf16-mixed", 1, 2560),
    Case("kvpath_mla", NARROW, 2, 3, "bf16-mixed", 1, 2048, offload=("optimizer", "parameters")),
)


class SecondStep(Callback):
    """The most bytes that live in the second step."""

    def __init__(self, live: LiveBytes) -> None:
        self.live, self.bytes = live, 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.live.peak = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.bytes = self.live.peak


def measure(case: Case, small: bool) -> int:
    """Train, on this rank; gives the bytes."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // case.ranks))
    config = case.config(small)
    shape = (case.accumulation, case.micro_batch, case.seq_len)
    batch = {name: torch.randint(config.vocab_size, shape) for name in ("tokens", "labels")}
    with LiveBytes("cpu") as live:  # DeepSpeed makes a copy of the weights on the meta device
        second = SecondStep(live)
        trainer = Trainer(
            accelerator="cpu",
            devices=case.ranks,
            strategy=strategy(case),
            precision=case.precision,  # type: ignore[arg-type]
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[second],
        )
        model = LanguageModel(config, OptimizerConfig(warmup_steps=1), activation_checkpointing=case.checkpointing)
        trainer.fit(model, DataLoader([batch, batch], batch_size=None))  # type: ignore[arg-type]
    return second.bytes


def strategy(case: Case) -> Any:
    """The Trainer's."""
    if not case.stage:
        from kvpath.training.meeting import DDP

        return DDP() if case.ranks > 1 else "auto"
    from kvpath.training.deepspeed.strategy import ZeRO

    return ZeRO(stage=case.stage, **case.fields)  # type: ignore[arg-type]


def plan(case: Case, small: bool) -> tuple[int, Memory]:
    """Parameters, and what is told of this case."""
    config = case.config(small)
    parameters = count_parameters(on_meta(config))
    kind = (case.micro_batch, case.seq_len, case.accumulation, case.checkpointing)
    return parameters, memory_of(config, parameters, case.sharing, *kind)


def on_ranks(case: Case, small: bool) -> int:
    """`measure` in processes of its own; the most of any rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, __file__, "--case", str(CASES.index(case)), *["--small"] * small]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(case.ranks), "NODE_RANK": "0"}
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(case.ranks)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{case.name} failed")
    return max(int(output.splitlines()[-1]) for output in said)


def main(argv: list[str] | None = None) -> int:
    """Compare all cases; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cases whose names have all these words")
    parser.add_argument("--small", action="store_true", help="toy models")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    if args.case is not None:
        print(measure(CASES[args.case], args.small))
        return 0
    cases = [case for case in CASES if set(args.only) <= set(case.name.split())]
    if not find_spec("deepspeed"):
        print("DeepSpeed is not installed: cases of ZeRO are left out", file=sys.stderr)
        cases = [case for case in cases if not case.stage]
    rows = [compared(case, args.small, lambda text: print(text, file=sys.stderr, flush=True)) for case in cases]
    print(table([{key: value for key, value in row.items() if key != "parts"} for row in rows]))
    print(json.dumps(rows))
    return int(any(abs(row["planned_over_measured"] - 1) > TOLERANCE for row in rows))


def compared(case: Case, small: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """A row of the table."""
    parameters, memory = plan(case, small)
    measured = on_ranks(case, small)
    planned = memory.total + memory.host
    say(f"{case.name}: planned {planned / 1e9:.3f} GB, measured {measured / 1e9:.3f} GB, {planned / measured:.3f}")
    return {
        "case": case.name,
        "parameters": parameters,
        "activations": f"{memory.activations / planned:.0%}",
        "planned_gb": round(planned / 1e9, 4),
        "measured_gb": round(measured / 1e9, 4),
        "planned_over_measured": round(planned / measured, 4),
        "parts": asdict(memory),
    }


if __name__ == "__main__":
    sys.exit(main())
