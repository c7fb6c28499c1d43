"""Files that are there in full or not at all, whatever ends the process or the power."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

TEMPORARY = ".tmp"
"""What a file is called until it is whole; what a kill leaves under such a name is worth nothing."""

_OLD = "old-"
"""And what a folder, while another takes its place."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that is there in full or not at all."""
    temporary = path.with_name(path.name + TEMPORARY)
    with temporary.open("wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())
    put_in_place(temporary, path)


def save_to_disk(content: Any, path: str | Path) -> None:
    """Write a file of tensors, down to the disk.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's own, in place of what the file said
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        file.flush()
        os.fsync(file.fileno())


def put_in_place(temporary: Path, path: Path) -> None:
    """Give a finished file its name for good, in one step; where one is a folder, what has the name is moved away."""
    if path.exists() and (path.is_dir() or temporary.is_dir()):
        old = path.with_name(f"{_OLD}{path.name}{TEMPORARY}")
        path.replace(old)
        temporary.replace(path)
        remove(old)
    else:
        temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def keep_as(path: Path, other: Path) -> None:
    """Let `other` be what `path` is, which stays where it is, if it is a file and the file system has links."""
    remove(other)
    try:
        os.link(path, other)
    except OSError:
        path.replace(other)


def stand_in(path: Path, other: Path) -> None:
    """Let `other` be what `path` is, which stays; whatever `other` was is gone."""
    temporary = other.with_suffix(TEMPORARY)
    remove(temporary)
    if path.is_dir():
        shutil.copytree(path, temporary, copy_function=_link)
    else:
        _link(path, temporary)
    put_in_place(temporary, other)


def _link(path: str | Path, other: str | Path) -> None:
    try:
        os.link(path, other)
    except OSError:
        shutil.copyfile(path, other)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(*folders: Path) -> None:
    """Remove what writers that were killed have left, but for a folder whose successor never came."""
    for folder in folders:
        for path in folder.glob(f"*{TEMPORARY}"):
            name = path.with_name(path.name.removeprefix(_OLD).removesuffix(TEMPORARY))
            if path.name.startswith(_OLD) and not name.exists():
                path.replace(name)
            remove(path)
