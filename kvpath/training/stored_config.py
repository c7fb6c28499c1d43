"""Configurations as plain values, for files that must load without running code, and the version of our formats."""

import pickle
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from kvpath.attention.output import OutputProjection
from kvpath.attention.strategy import AttentionStrategy
from kvpath.errors import UserError

FORMAT_VERSION = 1
"""Version of checkpoints and run directories."""


def check_format(version: object) -> None:
    """Refuse a file that this version cannot read.

    Raises:
        UserError: naming both versions.
    """
    if version is None:
        raise UserError("the checkpoint holds no kvpath format_version: it was not written by kvpath")
    if version != FORMAT_VERSION:
        raise UserError(f"the checkpoint has format_version {version}; this kvpath reads {FORMAT_VERSION}")


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What a checkpoint file holds, its tensors mapped; nothing in it is run.

    Raises:
        UserError: if it is damaged, no checkpoint, or of another format.
    """
    try:
        stored = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).split("\n")[0].split(". ")[0]
        raise UserError(f"{path} is damaged, or no checkpoint of kvpath: {reason}") from error
    check_format(stored.get("kvpath", {}).get("format_version") if isinstance(stored, dict) else None)
    return dict(stored)


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
