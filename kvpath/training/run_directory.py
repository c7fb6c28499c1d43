"""One run, one directory: what stands where, and how a run is found again."""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvpath.errors import UserError
from kvpath.interop.exported import TOKENIZER, WEIGHTS, is_export
from kvpath.training.deepspeed.directory import is_sharded
from kvpath.training.say import rank_zero_say
from kvpath.training.stored_config import Damaged, stored_step
from kvpath.training.whole_files import remove_leftovers, write_whole
from kvpath.version import __version__

_PACKAGES = ("torch", "lightning", "deepspeed", "torchmetrics", "datasets", "tokenizers", "tensorboard", "numpy")


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        """The complete configuration; loads again."""
        self.env = self.path / "env.json"
        """Versions, commit, command line: an entry for each attempt."""
        self.metrics = self.path / "metrics.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.curves = self.path / "tb"
        """TensorBoard's event files."""
        self.checkpoints = self.path / "checkpoints"
        self.last = self.checkpoints / "last.ckpt"
        self.previous = self.checkpoints / "previous.ckpt"
        """The one before `last`, for when that is damaged."""
        self.events = self.path / "events.jsonl"
        """What went wrong: steps that were not taken."""
        self.bad_batches = self.path / "bad_batches"
        self.summary = self.path / "summary.json"
        self.tokenizer = self.path / TOKENIZER

    @property
    def holds_a_run(self) -> bool:
        """Whether a run was ever started here."""
        return self.config.exists() or self.last.exists() or self.previous.exists()

    def begin(self, config: str) -> None:
        """Write the configuration and an entry for this attempt, and take away what says that the run has ended."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.path, self.curves, self.bad_batches)
        self.summary.unlink(missing_ok=True)
        write_whole(self.config, config)
        attempts = json.loads(self.env.read_text(encoding="utf-8")) if self.env.exists() else []
        write_whole(self.env, json.dumps([*attempts, environment()], indent=2) + "\n")

    def finish(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`."""
        write_whole(self.summary, json.dumps(summary, indent=2) + "\n")


def environment() -> dict[str, Any]:
    """What this process runs on."""
    packages: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(sys.argv),
        "kvpath": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES", "all"),
        "cpus": os.cpu_count(),
    }


def commit() -> str | None:
    """The commit of the checkout that kvpath runs from, marked if it has changes; None outside of one."""
    folder = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None


def find_checkpoint(path: str | Path, field: str = "ckpt_path") -> Path:
    """The checkpoint that `path` names: itself, the `last` of a run directory, or the weights of an export.

    That of a ZeRO run is a directory.

    Args:
        path: A file or a directory.
        field: What the path was given for, as errors call it.

    Raises:
        UserError: if there are no weights there; random ones are never used instead.
    """
    path = Path(path)
    if path.is_file() or is_sharded(path):
        return path
    if not path.exists():
        raise UserError(f"{field} {path}: there is no such file or directory")
    run = RunDirectory(path)
    for candidate in (run.last, run.previous, path / "last.ckpt", path / WEIGHTS):
        if candidate.is_file() or is_sharded(candidate):
            return candidate
    raise UserError(f"{field} {path}: no weights in this directory (expected checkpoints/last.ckpt or {WEIGHTS})")


def newest_whole(run: RunDirectory) -> Path | None:
    """The checkpoint that a run goes on from: its last, or with a line that says so the one before, if that is damaged.

    Raises:
        UserError: there is none that can be read.
    """
    if not run.last.exists():
        return run.previous if run.previous.exists() else None
    try:
        stored_step(run.last)
    except Damaged as damaged:
        if not run.previous.exists():
            raise
        rank_zero_say(f"{damaged}; going back to the one before it, step {stored_step(run.previous):,}")
        return run.previous
    return run.last


def run_of(checkpoint: Path) -> RunDirectory | None:
    """The run directory that a checkpoint file lies in, if it lies in one; an export stands by itself."""
    run = RunDirectory(checkpoint.parent.parent)
    return run if run.config.exists() and not is_export(checkpoint) else None
