"""What is settled before a command line is parsed: run directory, weights, and the configuration beside them."""

import os
import time

from kvpath.cli.resume import stored_config
from kvpath.errors import UserError
from kvpath.interop.exported import is_export
from kvpath.training.run_directory import RunDirectory, find_checkpoint, run_of
from kvpath.training.say import rank_zero_say
from kvpath.training.stored_config import stored_step


def prepare_fit(argv: list[str]) -> list[str]:
    """Settle the run directory and what to resume from, before parsing."""
    if "--help" in argv or "-h" in argv or any(argument.startswith("--print_config") for argument in argv):
        return argv
    run = option(argv, "run")
    if run is None:
        # Ranks that a launcher starts later inherit the name.
        if "LOCAL_RANK" not in os.environ:
            os.environ["KVPATH_RUN"] = f"runs/{time.strftime('%Y%m%d-%H%M%S')}"
        run = os.environ.get("KVPATH_RUN", "runs/unnamed")
        argv = [*argv, "--run", run]
    directory, wanted = RunDirectory(run), option(argv, "ckpt_path")
    if wanted is None:
        if directory.holds_a_run and not option(argv, "trainer.fast_dev_run"):
            raise UserError(
                f"run {run}: there is a run already; --ckpt_path last continues it, another --run starts anew"
            )
        return argv
    argv = without_option(argv, "ckpt_path")
    stored = ["--config", str(directory.config)] if directory.config.exists() else []
    if wanted == "last" and not directory.last.exists():
        rank_zero_say(f"no checkpoint in {run} yet: starting from step 0")
        return [*stored, *argv]
    checkpoint = directory.last if wanted == "last" else find_checkpoint(wanted)
    if is_export(checkpoint):
        raise UserError(f"ckpt_path {wanted}: an export has weights and no optimizer state; --init_from starts from it")
    rank_zero_say(f"resuming from {checkpoint}, step {stored_step(checkpoint):,}")
    return [*stored, *argv, "--ckpt_path", str(checkpoint), "--weights_only", "true"]


def prepare_evaluation(command: str, argv: list[str]) -> list[str]:
    """Find the weights and put the configuration stored beside them first, before parsing."""
    if "--help" in argv or "-h" in argv or any(argument.startswith("--print_config") for argument in argv):
        return argv
    wanted = option(argv, "ckpt_path")
    if wanted is None:
        raise UserError(f"{command} needs --ckpt_path: a run directory, a checkpoint file or an exported directory")
    checkpoint = find_checkpoint(wanted)
    argv = without_option(argv, "ckpt_path")
    run = run_of(checkpoint)
    stored = run.config if run is not None else stored_config(checkpoint)
    if run is not None and option(argv, "run") is None:
        argv = [*argv, "--run", str(run.path)]
    quiet = ["--verbose", "false"] if command in ("validate", "test") else []
    return ["--config", str(stored), *quiet, *argv, "--ckpt_path", str(checkpoint), "--weights_only", "true"]


def option(argv: list[str], name: str) -> str | None:
    """The last value of `--name VALUE` or `--name=VALUE`."""
    value = None
    for position, argument in enumerate(argv):
        if argument == f"--{name}":
            value = argv[position + 1] if position + 1 < len(argv) else None
        elif argument.startswith(f"--{name}="):
            value = argument.split("=", 1)[1]
    return value


def without_option(argv: list[str], name: str) -> list[str]:
    """`argv` without `--name VALUE` and `--name=VALUE`."""
    kept, skip = [], False
    for argument in argv:
        if skip:
            skip = False
        elif argument == f"--{name}":
            skip = True
        elif not argument.startswith(f"--{name}="):
            kept.append(argument)
    return kept
