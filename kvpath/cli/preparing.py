"""What is settled before a command line is parsed: run directory, weights, and the configuration beside them."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from kvpath.cli.resume import config_for_evaluation, stored_config
from kvpath.errors import UserError
from kvpath.interop.exported import is_export
from kvpath.launch import Launch
from kvpath.training.run_directory import RunDirectory, find_checkpoint, newest_whole, run_of
from kvpath.training.say import rank_zero_say
from kvpath.training.stored_config import stored_step


def prepare_fit(argv: list[str]) -> list[str]:
    """Settle the run directory and what to resume from, before parsing.

    Raises:
        UserError: the directory and the checkpoint do not go together, or a piece cannot be read.
    """
    if _only_prints(argv):
        return argv
    in_pieces = stated_in_pieces(argv)
    run = option(argv, "run") or in_pieces.get("run")
    if run is None:
        launch = Launch.from_environment()
        if launch is not None and launch.ranks > 1 and "KVPATH_RUN" not in os.environ:
            raise UserError(f"{launch.launcher} has started {launch.ranks} ranks, which need one --run: a directory")
        # Ranks that Lightning starts later inherit the name.
        if "LOCAL_RANK" not in os.environ:
            os.environ["KVPATH_RUN"] = f"runs/{time.strftime('%Y%m%d-%H%M%S')}"
        run = os.environ.get("KVPATH_RUN", "runs/unnamed")
    if option(argv, "run") is None:
        argv = [*argv, "--run", run]
    if Path(run).is_file():
        raise UserError(f"run {run}: that is a file; a run needs a directory of its own")
    directory, wanted = RunDirectory(run), option(argv, "ckpt_path")
    if wanted is None:
        if directory.holds_a_run and writes_a_run(argv):
            raise UserError(
                f"run {run}: there is a run already; --ckpt_path last continues it, another --run starts anew"
            )
        return argv
    argv = without_option(argv, "ckpt_path")
    checkpoint = newest_whole(directory) if wanted == "last" else find_checkpoint(wanted)
    if checkpoint is None:
        if not directory.config.exists() and not any(word.startswith(("-c", "--config", "--model")) for word in argv):
            raise UserError(f"ckpt_path last: there is no run in {run} to go on with, nor a -c PIECE to begin one with")
        rank_zero_say(f"no checkpoint in {run} yet: starting from step 0")
        return [*_config(directory), *argv]
    owner = run_of(checkpoint)
    if owner is not None and directory.holds_a_run and owner.path.resolve() != directory.path.resolve():
        raise UserError(
            f"ckpt_path {wanted} is of another run than the one in {run};"
            " --ckpt_path last continues that one, and a new --run goes on from this checkpoint"
        )
    if is_export(checkpoint):
        raise UserError(f"ckpt_path {wanted}: an export has weights and no optimizer state; --init_from starts from it")
    rank_zero_say(f"resuming from {checkpoint}, step {stored_step(checkpoint):,}")
    return [*_config(owner or directory), *argv, "--ckpt_path", str(checkpoint), "--weights_only", "true"]


def prepare_evaluation(command: str, argv: list[str]) -> list[str]:
    """Find the weights and put the configuration stored beside them first, before parsing.

    Raises:
        UserError: there are no weights, or a piece cannot be read.
    """
    if _only_prints(argv):
        return argv
    in_pieces = stated_in_pieces(argv)
    wanted = option(argv, "ckpt_path")
    if wanted is None:
        raise UserError(f"{command} needs --ckpt_path: a run directory, a checkpoint file or an exported directory")
    checkpoint = find_checkpoint(wanted)
    argv = without_option(argv, "ckpt_path")
    run = run_of(checkpoint)
    stored = config_for_evaluation(run) if run is not None else stored_config(checkpoint)
    if run is not None and option(argv, "run") is None and in_pieces.get("run") is None:
        argv = [*argv, "--run", str(run.path)]
    quiet = ["--verbose", "false"] if command in ("validate", "test") else []
    return ["--config", str(stored), *quiet, *argv, "--ckpt_path", str(checkpoint), "--weights_only", "true"]


def writes_a_run(argv: list[str]) -> bool:
    """Whether a fit with these arguments writes to its run directory; `--trainer.fast_dev_run false` does."""
    return not _only_prints(argv) and not yaml.safe_load(option(argv, "trainer.fast_dev_run") or "false")


def _only_prints(argv: list[str]) -> bool:
    return "--help" in argv or "-h" in argv or any(argument.startswith("--print_config") for argument in argv)


def _config(run: RunDirectory) -> list[str]:
    return ["--config", str(run.config)] if run.config.exists() else []


def stated_in_pieces(argv: list[str]) -> dict[str, Any]:
    """The top-level keys of the pieces that `-c` names, later ones over earlier ones.

    Raises:
        UserError: a piece is no YAML, or says which checkpoint to take, which is looked for before pieces are read.
    """
    stated: dict[str, Any] = {}
    for piece in _pieces(argv):
        try:
            values = yaml.safe_load(Path(piece).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"{piece} cannot be read: {' '.join(str(error).split())}") from error
        if not isinstance(values, dict):
            raise UserError(f"{piece} must hold keys with values, got {'nothing' if values is None else repr(values)}")
        if values.get("ckpt_path") is not None:
            raise UserError(f"{piece}: ckpt_path={values['ckpt_path']} cannot be set in a piece: state --ckpt_path")
        stated |= values
    return stated


def _pieces(argv: list[str]) -> Iterator[str]:
    """The files that `-c X`, `--config X`, `-c=X` and `--config=X` name."""
    for flag, following in zip(argv, [*argv[1:], None], strict=True):
        name, equals, value = flag.partition("=")
        if name in ("-c", "--config") and (found := value if equals else following) is not None:
            yield found


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
