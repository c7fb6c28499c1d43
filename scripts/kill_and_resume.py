#!/usr/bin/env python
"""Kills a training run with signal 9 again and again, resumes it each time, and compares it with one left alone.

    scripts/kill_and_resume.py                       # 20 kills, five of them aimed at a save
    scripts/kill_and_resume.py --kills 40 --ranks 2 --workers 2
    scripts/kill_and_resume.py --ranks 2 --zero 2    # with DeepSpeed

Two runs of the same configuration, on text that is made up here: one is left alone; the other is killed at random
points of start-up, steps, validations and saves. In the end both must have seen the same tokens (the hash of their
stream), have the same weights bit for bit, and the same lines in their metrics. One line a kill says where it fell;
the last line is JSON.

Exit codes: 0, 1 if the runs differ, 2 for a wrong argument.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from kvpath.training.stored_config import read_checkpoint, stored_step

PHASES = ("start-up", "step", "validation", "save")
POLL = 0.002
"""Seconds between two looks at what a run is doing."""

LINGER = {"step": 2.0, "validation": 0.1, "save": 0.03}
"""Seconds, at most, between the beginning of a phase and a kill."""

TIMELESS = (
    *("train/loss", "train/gradient_norm", "train/learning_rate", "train/tokens"),
    *("validation/loss", "data/stream_hash"),
)
"""What of a line of metrics says nothing about time or memory."""

CHILD = """
import sys
from pathlib import Path

from lightning.pytorch import Callback, Trainer
from kvpath.cli.main import main
from kvpath.training.module import LanguageModel
from kvpath.training.saving import Saving

phase, argv = Path(sys.argv[1]), sys.argv[2:]


def told(function, name, after):
    def run(*args, **kwargs):
        phase.write_text(name)
        try:
            return function(*args, **kwargs)
        finally:
            phase.write_text(after)
    return run


LanguageModel.training_step = told(LanguageModel.training_step, "step", "step")
Trainer.save_checkpoint = told(Trainer.save_checkpoint, "save", "step")
start, end = LanguageModel.on_validation_epoch_start, LanguageModel.on_validation_epoch_end
LanguageModel.on_validation_epoch_start = told(start, "validation", "validation")
LanguageModel.on_validation_epoch_end = told(end, "validation", "step")
sys.exit(main(argv))
"""
"""A run that writes what it is doing into a file."""


@dataclass(frozen=True)
class Study:
    """Two runs of one configuration."""

    folder: Path
    ranks: int
    workers: int
    steps: int
    zero: int = 0
    """Stage of ZeRO; 0 without DeepSpeed."""

    def command(self, run: Path) -> list[str]:
        """`kvpath fit`, which goes on where it was."""
        seq_len, sequences = 64, 4
        values: dict[str, object] = {
            "model.backbone.vocab_size": 512,
            "model.backbone.d_model": 256,
            "model.backbone.n_layers": 4,
            "model.backbone.d_ff": 512,
            "model.backbone.max_seq_len": seq_len,
            "model.backbone.attention": "KVPathConcat",
            "model.backbone.attention.n_heads": 2,
            "model.backbone.attention.n_kv_heads": 1,
            "model.backbone.attention.head_dim": 48,
            "model.backbone.attention.delta_dim": 16,
            "model.backbone.attention.path_length": 4,
            "model.optimizer.warmup_steps": self.steps // 10,
            "data.source": "Files",
            "data.source.files": [str(self.folder / "text.jsonl")],
            "data.tokenizer.name": "train",
            "data.tokenizer.vocab_size": 400,
            "data.holdout_every": 20,
            "data.seq_len": seq_len,
            "data.num_workers": self.workers,
            "data.budget.tokens": self.steps * seq_len * sequences,
            "data.budget.global_batch_sequences": sequences,
            "data.budget.micro_batch": 1,
            "every.log": "1 steps",
            "every.validate": "7 steps",
            "every.save": "5 steps",
            "sample.tokens": 4,
            "trainer.accelerator": "cpu",
            "trainer.devices": self.ranks,
            "trainer.enable_progress_bar": "false",
            "peak_flops": 1e12,
            "run": run,
            "ckpt_path": "last",
        }
        if self.zero:
            values |= {
                "trainer.precision": "32-true",
                "trainer.strategy.bucket_elements": 100_000,
                "trainer.strategy.live_elements": 100_000,
            }
        pieces = [f"-c=hardware/zero{self.zero}"] if self.zero else []
        flags = [f"--{key}={json.dumps(value) if isinstance(value, list) else value}" for key, value in values.items()]
        return ["-c", CHILD, str(self.phase_file(run)), "fit", *pieces, *flags]

    def phase_file(self, run: Path) -> Path:
        return run.with_suffix(".phase")

    def start(self, run: Path) -> subprocess.Popen[bytes]:
        """One attempt."""
        self.phase_file(run).write_text("start-up")
        command = [sys.executable, *self.command(run)]
        if self.ranks > 1:
            ranks = [f"--nproc_per_node={self.ranks}", f"--master_port={free_port()}"]
            launcher = ["-m", "torch.distributed.run", *ranks, "--"]
            script = self.folder / "child.py"
            script.write_text(CHILD, encoding="utf-8")
            command = [sys.executable, *launcher, str(script), *self.command(run)[2:]]
        environment = {**os.environ, "KVPATH_CACHE": str(self.folder / "cache"), "OMP_NUM_THREADS": "1"}
        environment |= {"DS_ACCELERATOR": "cpu"} if self.zero else {}
        with run.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def phase(self, run: Path) -> str:
        return self.phase_file(run).read_text() or "step"


def main(argv: list[str] | None = None) -> int:
    """Run both, compare them; gives the exit code."""
    args = parse(argv)
    study = Study(args.folder.resolve(), args.ranks, args.workers, args.steps, args.zero)
    shutil.rmtree(study.folder, ignore_errors=True)
    study.folder.mkdir(parents=True)
    write_text(study.folder / "text.jsonl")
    draw = random.Random(args.seed)

    alone, killed = study.folder / "alone", study.folder / "killed"
    began = time.monotonic()
    finish(study, alone)
    print(f"left alone: {time.monotonic() - began:.0f} s", flush=True)

    fell: Counter[str] = Counter()
    for number, aim in enumerate(aims(args.kills, draw), start=1):
        phase, step = kill(study, killed, aim, draw)
        fell[phase] += 1
        print(f"kill {number} of {args.kills}: aimed at {aim}, fell into {phase}; last checkpoint {step}", flush=True)
    finish(study, killed)

    differences = [*compare(alone, killed)]
    print("\n".join(differences) or "same stream, weights and metrics as the run left alone")
    result = {
        "kills": args.kills,
        "fell_into": {phase: fell[phase] for phase in PHASES},
        "ranks": args.ranks,
        "workers": args.workers,
        "zero": args.zero,
        "steps": args.steps,
        "stream_hash": last_hash(killed),
        "equal": not differences,
    }
    print(json.dumps(result))
    return 1 if differences else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="how often the run is killed (20)")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the run (1)")
    parser.add_argument("--workers", type=int, default=0, help="processes that read data, for each rank (0)")
    parser.add_argument(
        "--zero", type=int, default=0, choices=range(4), help="stage of DeepSpeed's ZeRO; 0 without (0)"
    )
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of the run (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the points at which it is killed (0)")
    parser.add_argument("--folder", type=Path, default=Path("runs/kill_and_resume"), help="emptied first")
    args = parser.parse_args(argv)
    for name in ("kills", "ranks", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be positive, got {getattr(args, name)}")
    return args


def write_text(path: Path) -> None:
    """Documents of made-up words, some long and some short."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(300)]
    documents = (" ".join(draw.choices(words, k=draw.randint(5, 200))) for _ in range(400))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")


def aims(kills: int, draw: random.Random) -> Iterator[str]:
    """What each kill waits for: a quarter saves or more, some of every other phase, in random order."""
    wanted = ["save"] * -(-kills * 2 // 5) + ["validation", "start-up"] * (kills // 10)
    wanted += ["step"] * (kills - len(wanted))
    draw.shuffle(wanted)
    yield from wanted[:kills]


def kill(study: Study, run: Path, aim: str, draw: random.Random) -> tuple[str, str]:
    """Start an attempt, kill it in the phase aimed at; gives where it fell, and the step of the last checkpoint."""
    process = study.start(run)
    if aim == "start-up":
        time.sleep(draw.uniform(0.1, 4.0))
    else:
        skip = draw.randint(0, 2)  # how many such phases pass first
        while process.poll() is None:
            if study.phase(run) == aim:
                if skip == 0:
                    break
                skip -= 1
                while study.phase(run) == aim and process.poll() is None:
                    time.sleep(POLL)
            time.sleep(POLL)
        time.sleep(draw.uniform(0, LINGER[aim]))
    phase = study.phase(run)
    for pid in [process.pid, *descendants(process.pid)]:  # a launcher's ranks are in sessions of their own
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if process.wait() >= 0:
        why = f"state more --steps, or see {run.with_suffix('.log')}"
        sys.exit(f"the run ended by itself before it could be killed, with {process.returncode}: {why}")
    return phase, step_of(run)


def descendants(pid: int) -> list[int]:
    """Processes that it has started, that these have started, and so on."""
    try:
        own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]
    except OSError:
        return []  # it has ended
    return [*own, *(later for child in own for later in descendants(child))]


def finish(study: Study, run: Path) -> None:
    """Let a run come to its end."""
    if code := study.start(run).wait():
        sys.exit(f"{run} ended with {code}: see {run.with_suffix('.log')}")


def step_of(run: Path) -> str:
    """What the last checkpoint says, which must always be readable."""
    last = run / "checkpoints" / "last.ckpt"
    return f"at step {stored_step(last)}" if last.exists() else "none yet"


def compare(alone: Path, killed: Path) -> Iterator[str]:
    """Every difference in stream, weights and metrics."""
    if last_hash(alone) != last_hash(killed):
        yield f"the streams differ: {last_hash(alone)} and {last_hash(killed)}"
    first, second = (read_checkpoint(run / "checkpoints" / "last.ckpt")["state_dict"] for run in (alone, killed))
    yield from (f"{name} differs" for name in first if not torch.equal(first[name], second[name]))
    for ours, theirs in zip(lines(alone), lines(killed), strict=True):
        if ours != theirs:
            yield f"metrics differ: {ours} and {theirs}"


def lines(run: Path) -> list[dict[str, object]]:
    """The metrics, without what depends on time."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: row[key] for key in ("step", *TIMELESS) if key in row} for row in rows]


def last_hash(run: Path) -> object:
    """The hash of all tokens seen."""
    return [row["data/stream_hash"] for row in lines(run) if "data/stream_hash" in row][-1]


def free_port() -> int:
    """A port that no one listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
