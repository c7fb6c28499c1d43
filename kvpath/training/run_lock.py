"""One fit at a time in a run directory."""

import errno
import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from kvpath.errors import UserError
from kvpath.training.say import rank_zero_say

_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


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
    path = directory / ".lock"
    lock = _take(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before it is let go of, so that who waits for it finds out
        os.close(lock)
        if not any(directory.iterdir()):
            directory.rmdir()


def _take(path: Path) -> int:
    """An open file that is locked, and still the one of this name."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # A record lock: data-loader workers, which may outlive a killed run by seconds, do not share it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                rank_zero_say(f"warning: this disk has no locks: keep other runs out of {path.parent} yourself")
                return file
            holder = os.read(file, 200).decode(errors="replace").strip()
            os.close(file)
            if error.errno not in _HELD:
                raise
            raise UserError(f"run {path.parent}: {holder or 'another process'} is training in there") from error
        if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
            return file
        os.close(file)
