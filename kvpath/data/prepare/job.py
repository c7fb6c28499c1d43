"""A job's share of the parts, and the locks by which only one process makes it at a time."""

import errno
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvpath.errors import UserError

_LOCK = ".lock"
_WORKERS = ".workers.lock"
_SECONDS_TO_END = 30.0
"""Within which the workers of a killed attempt have noticed; most often it takes a moment."""


@dataclass(frozen=True)
class Job:
    """A share of the parts, for one job of a cluster's array: those whose number leaves ``number - 1`` by ``of``.

    Args:
        number: from 1 to ``of``.
        of: jobs in all.
    """

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> "Job":
        """From ``J/N``.

        Raises:
            UserError: it is not of that form.
        """
        number, slash, of = text.partition("/")
        if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
            raise UserError(f"--job must be J/N with J from 1 to N, such as 3/8, got {text!r}")
        return cls(int(number), int(of))

    def has(self, part: int) -> bool:
        """Whether a part is of its share."""
        return part % self.of == self.number - 1


@contextmanager
def alone(directory: Path, job: Job | None) -> Iterator[None]:
    """One process for each job, or one for all; the system lets go of the lock with the process.

    A process that was killed can leave workers behind for a moment: they are waited for, because what they begin to
    write meanwhile nobody would remove.

    Raises:
        UserError: another process is at work.
    """
    with (directory / _LOCK).open("a+b") as file:
        if not _try(file, fcntl.LOCK_EX, job):
            raise UserError(f"another `kvpath prepare` is at work in {directory}")
        with (directory / _WORKERS).open("a+b") as of_workers:
            until = time.monotonic() + _SECONDS_TO_END
            while not _try(of_workers, fcntl.LOCK_EX, job):
                if time.monotonic() > until:
                    raise UserError(f"workers of another `kvpath prepare` are still at work in {directory}")
                time.sleep(0.02)
        yield


def hold_as_worker(directory: Path, job: Job | None) -> BinaryIO:
    """Tell `alone` that this process may still be writing, until it ends.

    Returns:
        the locked file, which has to be kept.
    """
    file = (directory / _WORKERS).open("a+b")
    _try(file, fcntl.LOCK_SH, job)
    return file


def _try(file: BinaryIO, kind: int, job: Job | None) -> bool:
    """Take a lock on a job's byte, or on all; False if somebody else has it.

    Where a file system has no locks nobody can be told apart: then it is as if it were taken.
    """
    length, start = (1, job.number) if job else (0, 0)  # a length of 0 is to the end
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB, length, start)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True
