"""One fit at a time in a run directory, and one worker at a job of a series."""

import errno
import fcntl
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from kvpath.errors import UserError
from kvpath.training.say import rank_zero_say

_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)

LOCK = ".lock"
"""The file of a run directory that its fit holds."""


class Held(UserError):
    """Another process holds a lock."""


@contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Hold the lock of a run directory, on the first rank; the kernel lets go of it when the process is killed.

    A directory in which nothing was written is gone afterwards.

    Raises:
        UserError: another process holds it, which is named.
    """
    if getattr(rank_zero_only, "rank", 0) != 0:
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    lock = take(path)
    try:
        yield
    finally:
        let_go(path, lock)
        if not any(directory.iterdir()):
            directory.rmdir()


def let_go(path: Path, lock: int) -> None:
    """Give back what `take` gave."""
    path.unlink(missing_ok=True)  # before it is let go of, so that who waits for it finds out
    os.close(lock)


def holder(path: Path) -> str | None:
    """Who holds a lock, without touching it; None if no other process does.

    Not to be asked by the process that holds it: that would let go of it.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        wanted = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        found = struct.unpack("hhqqi0q", fcntl.fcntl(file, fcntl.F_GETLK, wanted))
        if found[0] == fcntl.F_UNLCK:
            return None
        return os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    finally:
        os.close(file)


def take(path: Path) -> int:
    """An open file that is locked, and still the one of this name.

    Raises:
        Held: another process has it, which is named.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # A record lock: data-loader workers, which may outlive a killed run by seconds, do not share it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                rank_zero_say(f"warning: this disk has no locks: keep other runs out of {path.parent} yourself")
                return file
            other = os.read(file, 200).decode(errors="replace").strip()
            os.close(file)
            if error.errno not in _HELD:
                raise
            raise Held(f"run {path.parent}: {other or 'another process'} is training in there") from error
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
            return file
        os.close(file)
