"""Configurations as plain values, for files that must load without running code, and the version of our formats."""

import pickle
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from kvpath.attention.output import OutputProjection
from kvpath.attention.strategy import AttentionStrategy
from kvpath.errors import UserError
from kvpath.version import __version__

FORMAT_VERSION = 1
"""Version of checkpoints, exports and results."""


class Damaged(UserError):
    """A file that cannot be read, whatever wrote it."""


UNREADABLE = (
    *(OSError, EOFError, RuntimeError, pickle.UnpicklingError),
    *(ValueError, LookupError, TypeError, AttributeError, AssertionError, OverflowError, MemoryError),
)
"""What reading a damaged file raises: its bytes may mean anything."""


def load_plain(path: Path, of: Path | None = None) -> dict[str, Any]:
    """The tensors, mapped, and plain values by name in a file that `torch.save` wrote. Nothing in it is run.

    Args:
        path: The file.
        of: What it is a part of, for the error.

    Raises:
        Damaged: it cannot be read.
    """
    try:
        stored = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except UNREADABLE as error:
        reason = (str(error).split("\n")[0].split(". ")[0] or type(error).__name__).removesuffix(".")
        part = f"{path.name}: " if of is not None else ""
        raise Damaged(f"{of or path} is damaged, or no checkpoint of kvpath: {part}{reason}") from error
    return stored if isinstance(stored, dict) else {}


def check_format(stored: Mapping[str, object], path: Path | None = None) -> None:
    """Refuse what this version cannot read.

    Args:
        stored: the `format_version` of a file, and the kvpath version it was `written_by`.
        path: the file, for the error.

    Raises:
        UserError: naming both formats, and the version of kvpath that reads the file's.
    """
    what, found = path or "the checkpoint", stored.get("format_version")
    if found is None:
        raise UserError(f"{what} holds no kvpath format_version: it was not written by kvpath")
    if found != FORMAT_VERSION:
        reader = stored.get("written_by", "the version that wrote it")
        raise UserError(
            f"{what} has format_version {found}, which kvpath {reader} reads;"
            f" this is kvpath {__version__}, which reads {FORMAT_VERSION}"
        )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, its tensors mapped, or the weights of an export in the same form.

    Nothing in it is run.

    Raises:
        Damaged: if it is damaged, or no checkpoint.
        UserError: if it is of another format.
    """
    from kvpath.interop.exported import is_export, read_export  # which needs this file
    from kvpath.training.deepspeed.directory import ShardedCheckpoint, is_sharded

    if is_sharded(path):
        sharded = ShardedCheckpoint.open(path)
        whole = {"state_dict": sharded.weights, "optimizer_states": sharded.optimizer_states}
        stored = {**sharded.trainer_state, **whole}
        check_format(stored.get("kvpath") or {})
        return stored
    if is_export(path):
        config, weights = read_export(path)
        return {
            "kvpath": vars(config),
            "global_step": config.step,
            "state_dict": {f"model.{name}": tensor for name, tensor in weights.items()},
        }
    stored = load_plain(path)
    own = stored.get("kvpath")
    check_format(own if isinstance(own, dict) else {})
    if missing := [name for name in ("global_step", "state_dict") if name not in stored]:
        raise Damaged(f"{path} is damaged: it has no {' and no '.join(missing)}")
    return stored


def to_plain(value: Any) -> Any:
    """Dataclasses as dictionaries; what is chosen by class as class_path and init_args."""
    if is_dataclass(value) and not isinstance(value, type):
        plain = {field.name: to_plain(getattr(value, field.name)) for field in fields(value) if field.init}
        if isinstance(value, AttentionStrategy | OutputProjection):
            kind = type(value)
            return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": plain}
        return plain
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def stored_step(path: Path) -> int:
    """The optimizer step that a checkpoint was written at."""
    return int(read_checkpoint(path)["global_step"])
