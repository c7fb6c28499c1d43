"""`kvpath fit`, `validate`, `test` and `predict`, from their arguments to their exit code."""

import logging
import warnings
from contextlib import nullcontext
from pathlib import Path

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from kvpath.cli.lightning import KVPathCLI
from kvpath.cli.preparing import option, prepare_evaluation, prepare_fit, writes_a_run
from kvpath.data.workers import dead_worker
from kvpath.errors import UserError, by_interrupt
from kvpath.launch import is_first_rank
from kvpath.pieces import resolve_argv
from kvpath.training.meeting import not_met
from kvpath.training.run_lock import only_writer


def fit(argv: list[str]) -> int:
    """Run `kvpath fit` with the arguments after the subcommand; gives the exit code."""
    return _run("fit", argv)


def validate(argv: list[str]) -> int:
    """Run `kvpath validate`, as `fit`."""
    return _run("validate", argv)


def test(argv: list[str]) -> int:
    """Run `kvpath test`, as `fit`."""
    return _run("test", argv)


def predict(argv: list[str]) -> int:
    """Run `kvpath predict`, as `fit`."""
    return _run("predict", argv)


def _run(command: str, argv: list[str]) -> int:
    quieten()
    if not is_first_rank():  # Lightning looks at NODE_RANK later
        rank_zero_only.rank = getattr(rank_zero_only, "rank", 0) or 1  # type: ignore[attr-defined]
    argv = resolve_argv(argv)
    argv = prepare_fit(argv) if command == "fit" else prepare_evaluation(command, argv)
    cli = type(command, (KVPathCLI,), {"command": command})  # not on the class: others in this process have theirs
    run = option(argv, "run") if command == "fit" and writes_a_run(argv) else None
    try:
        with only_writer(Path(run)) if run is not None else nullcontext():
            cli([command, *argv])
    except SystemExit as ended:
        if by_interrupt(ended):  # which Lightning ends with 1
            raise
        return int(ended.code or 0)
    except MisconfigurationException as error:
        raise UserError(f"trainer: {' '.join(str(error).split())}") from error
    except RuntimeError as error:
        # Torch says that a data worker died wherever the main process happens to be.
        if (mistake := dead_worker(error) or not_met(error)) is None:
            raise
        raise mistake from error
    return 0


def quieten() -> None:
    """Leave out what Lightning says about itself and what does not apply here."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric.utilities.seed").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.strategies.deepspeed").setLevel(logging.WARNING)
    for message in (
        ".*callbacks used to create the checkpoint need to be provided.*",
        ".*treespec.*",
        ".*Couldn't infer the batch indices.*",
        ".*does not have many workers.*",
        r"`torch\.distributed\..* is deprecated",  # by DeepSpeed
    ):
        warnings.filterwarnings("ignore", message=message)
