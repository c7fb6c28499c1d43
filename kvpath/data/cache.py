"""Where things made once are kept, and how they get there whole or not at all."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvpath.errors import UserError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def cache_dir() -> Path:
    """``KVPATH_CACHE``, else ``$XDG_CACHE_HOME/kvpath``, else ``~/.cache/kvpath``."""
    if chosen := os.environ.get("KVPATH_CACHE"):
        return Path(chosen).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "kvpath"


def digest(*parts: object) -> str:
    """A hash of JSON-able values, as 64 hexadecimal digits: equal values give equal digests, in every process."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@contextmanager
def room_in(directory: Path, bytes_needed: int | None = None) -> Iterator[None]:
    """Turn a full (or read-only) disk met inside the block into one clear line.

    Raises:
        UserError: names the directory and, if known, the bytes needed.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        needed = f" for {bytes_needed:,} bytes" if bytes_needed is not None else ""
        raise UserError(
            f"cannot write to {directory}: {os.strerror(error.errno)}{needed}; "
            "free some space or set KVPATH_CACHE to a directory that has it"
        ) from error


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content``: a reader sees the old file or the new one, never a part.

    Raises:
        UserError: if the disk is full.
    """
    # Beside the target, not in TMPDIR: a rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    with room_in(path.parent, len(content)):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Let ``build(directory)`` fill a new directory that then becomes ``target``; do nothing if ``target`` exists.

    Two processes may ask for the same target: one builds, the other waits for it. What a killed build left is removed
    by the next one.

    Raises:
        UserError: if the disk is full.
    """
    if target.exists():
        return target
    with room_in(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(target.name + ".lock")) as locked:
            if target.exists():
                return target
            if locked:
                for stale in target.parent.glob(f"{target.name}.*.part"):
                    shutil.rmtree(stale, ignore_errors=True)
            temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")
            temporary.mkdir()
            try:
                build(temporary)
                sync_directory(temporary)
                _rename_unless_made(temporary, target)
                sync_directory(target.parent)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return target


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock that the system releases with the process; yield False where locks do not exist."""
    with path.open("w") as file:
        locked = False
        # The lock only saves work and allows tidying up: the rename alone keeps a target whole.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
            locked = True
        yield locked


def _rename_unless_made(temporary: Path, target: Path) -> None:
    try:
        os.rename(temporary, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
