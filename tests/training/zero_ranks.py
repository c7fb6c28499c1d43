"""What the tests of ZeRO run on two ranks or so, started as a script: it reports as JSON."""

import faulthandler
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, Trainer

from kvpath.data import TokenizerConfig
from kvpath.errors import UserError
from kvpath.training import OptimizerConfig
from kvpath.training.deepspeed.strategy import ZeRO
from kvpath.training.meeting import DDP
from kvpath.training.saving import Saving
from kvpath.training.spikes import Action, Spikes
from kvpath.training.stored_config import read_checkpoint
from tests.cases import CASES, SHIPPED
from tests.nodes import CHECKOUT, free_port
from tests.training.toys import Record, Uneven, toy_backbone, toy_data, toy_module, toy_trainer

STEPS, NOT_TAKEN = 6, 3
PATIENCE = 240
"""Seconds that a plan may take, before each rank says where it stands and ends."""


@dataclass(frozen=True)
class Plan:
    """One run, or for `resume` three."""

    case: str
    """Of tests/cases.py."""

    strategy: str
    """auto, ddp, or zero1 to zero3, with +offload."""

    tied: bool = False
    activation_checkpointing: bool = False
    precision: str = "32-true"
    what: str = "train"
    """train: one step is not taken. back: one goes back to a checkpoint. skip and stop: what is done about a gradient
    of the last rank that is no number. resume: compared with an unbroken run. save: from `checkpoint`, if any, on."""

    stream: bool = False
    """Tokenise on the fly."""

    checkpoint: str | None = None

    def __str__(self) -> str:
        return "-".join(str(value) for name, value in asdict(self).items() if name != "checkpoint")


KINDS = ("ddp", "zero1", "zero2", "zero3", "zero2+offload", "zero3+offload")
EVERY = [Plan(case.name, kind, tied) for case in SHIPPED for tied in (False, True) for kind in KINDS]
"""Every attention with every strategy of several ranks, the head tied and not."""


class Jump(Spikes):
    """Takes the fourth loss for a spike: the checkpoint is of the second step."""

    def _what_is_wrong(self, loss: float, gradient_norm: float) -> tuple[str, Action] | None:
        return ("the test says so", "back") if len(self.losses) == 3 and not self.left_out else None


class Poison(Callback):
    """Makes the fourth gradient of the last rank no number."""

    def __init__(self) -> None:
        self._hook: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == NOT_TAKEN and trainer.global_rank == trainer.world_size - 1:
            self._hook = next(pl_module.parameters()).register_hook(lambda gradient: gradient * math.nan)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def strategy_of(name: str) -> str | DDP | ZeRO:
    """As the pieces of `hardware/` have it, but ZeRO with buckets that the parameters do not fit into."""
    if name == "auto":
        return name
    if name == "ddp":
        return DDP()
    stage, offload = int(name[4]), "+offload" in name
    return ZeRO(
        stage=stage,  # type: ignore[arg-type]
        offload_optimizer=offload,
        offload_parameters=offload and stage == 3,
        bucket_elements=3_000,
    )


def fit(plan: Plan, corpus: Path, *callbacks: Callback, ranks: int, **changes: Any) -> dict[str, Any]:
    """Train with uneven micro-batches of one sequence; gives what happened."""
    case = next(case for case in CASES if case.name == plan.case)
    backbone = toy_backbone(attention=case.attention, n_layers=case.n_layers, tied_embeddings=plan.tied)
    # AdamW divides by the size of a gradient: where that is hardly above 0, rounding would become a whole step.
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, eps=1e-4)
    module = toy_module(backbone, activation_checkpointing=plan.activation_checkpointing, optimizer=optimizer)
    if plan.what == "train":
        module.judge = lambda *_: module.global_step != NOT_TAKEN
    record, load = Record(), {name: changes.pop(name) for name in ("ckpt_path", "weights_only") if name in changes}
    plain: dict[str, Any] = {"devices": ranks, "strategy": strategy_of(plan.strategy), "precision": plan.precision}
    plain["enable_checkpointing"] = bool(callbacks)
    trainer = toy_trainer(record, *callbacks, **{**plain, **changes})
    streamed = stream_of(corpus) if plan.stream else {}
    data = toy_data(corpus, steps=STEPS, micro_batch=1, kind=Uneven, eval_batch_tokens=48, **streamed)
    trainer.fit(module, data, **load)
    return {
        "losses": record.losses,
        "gradient_norms": record.gradient_norms,
        "validation": [result["nll_sum"] for result in module.results],
        "hash": data.stream_hash(),
    }


def stream_of(corpus: Path) -> dict[str, Any]:
    """A stream needs a finished tokenizer: that of the tokenised corpus, in a file."""
    file = corpus.with_name("tokenizer.json")
    toy_data(corpus).load_tokenizer().save(file)
    stream = {"stream": True, "lanes": 4, "num_workers": 2, "eval_limit_tokens": 60}
    return {"tokenizer": TokenizerConfig(str(file)), **stream}


def run(plan: Plan, corpus: Path, folder: Path, ranks: int) -> dict[str, Any]:
    """What a plan asks for."""
    if plan.what == "back":
        folder.mkdir(parents=True, exist_ok=True)
        return fit(plan, corpus, Jump(folder), Saving(folder, "2 steps"), ranks=ranks)
    if plan.what == "train":
        return fit(plan, corpus, ranks=ranks)
    if plan.what in ("skip", "stop"):
        return fit_poisoned(plan, corpus, folder, ranks)
    if plan.what == "save":
        saving = Saving(folder, "2 steps")
        return fit(plan, corpus, saving, ranks=ranks, ckpt_path=plan.checkpoint, weights_only=True)
    unbroken = fit(plan, corpus, Saving(folder / "unbroken", "2 steps"), ranks=ranks)
    broken = fit(plan, corpus, Saving(folder / "broken", "2 steps"), ranks=ranks, max_steps=3)
    last = folder / "broken" / "last.ckpt"
    goes_on = fit(plan, corpus, Saving(folder / "broken", "2 steps"), ranks=ranks, ckpt_path=last, weights_only=True)
    weights = [read_checkpoint(folder / name / "last.ckpt")["state_dict"] for name in ("unbroken", "broken")]
    return {
        "losses": [unbroken["losses"], broken["losses"] + goes_on["losses"]],
        "validation": [unbroken["validation"], goes_on["validation"]],
        "hash": [unbroken["hash"], goes_on["hash"]],
        "same_weights": [bool(torch.equal(value, weights[1][name])) for name, value in weights[0].items()],
    }


def fit_poisoned(plan: Plan, corpus: Path, folder: Path, ranks: int) -> dict[str, Any]:
    """What happened, and of every rank what it left out and the mistake it ended with."""
    folder.mkdir(parents=True, exist_ok=True)
    spikes, saving = Spikes(folder, on_nan=cast(Action, plan.what)), Saving(folder, "2 steps")
    report, error = {}, None
    try:
        report = fit(plan, corpus, Poison(), spikes, saving, ranks=ranks)
    except UserError as found:
        error = str(found)
    own = {"error": error, "left_out": spikes.left_out}
    of_ranks: list[Any] = [own] * ranks
    if ranks > 1:
        torch.distributed.all_gather_object(of_ranks, own)
    return {**report, "of_ranks": of_ranks}


def on_ranks(plans: Sequence[Plan], corpus: Path, out: Path, ranks: int = 2) -> dict[str, Any]:
    """What all plans report."""
    (out / "plans.json").write_text(json.dumps([asdict(plan) for plan in plans]))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks), "NODE_RANK": "0"}
    shared |= {"PYTHONPATH": str(CHECKOUT), "DS_ACCELERATOR": "cpu"}
    said = [out / f"rank{rank}.txt" for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(corpus), str(out)],
            env={**os.environ, **shared, "LOCAL_RANK": str(rank), "RANK": str(rank)},
            stdout=said[rank].open("w"),  # a pipe that nobody reads would stop a rank
            stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]
    try:
        codes = [process.wait(timeout=1200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * ranks, [file.read_text()[-2000:] for file in said]
    reports: dict[str, Any] = json.loads((out / "reports.json").read_text())
    return reports


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed calls what torch is about to rename
    corpus, out, ranks = Path(sys.argv[1]), Path(sys.argv[2]), int(os.environ["WORLD_SIZE"])
    reports = {}
    for plan in [Plan(**values) for values in json.loads((out / "plans.json").read_text())]:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        reports[str(plan)] = run(plan, corpus, out / str(plan), ranks=ranks)
    if torch.distributed.get_rank() == 0:
        (out / "reports.json").write_text(json.dumps(reports))
