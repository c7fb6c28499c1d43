"""The one exception for mistakes that the user can mend, what a disk may refuse, and an exit code."""

import errno
from collections.abc import Iterable


class UserError(Exception):
    """A mistake recognised where it is made: the command line prints its message as one line and exits with 2.

    Say the field, the value and what would be right: ``d_ff must be positive, got -1``.
    """

    on_every_machine = False
    """Whether the first rank of each machine says it, and not that of the run alone."""

    @classmethod
    def raise_all(cls, problems: Iterable[str]) -> None:
        """Raise every problem found in one place together, or nothing if there are none.

        Raises:
            UserError: if ``problems`` is not empty.
        """
        found = list(problems)
        if found:
            raise cls("; ".join(found))


TO_BE_RUN_AGAIN = 75
"""The exit code of a run that was stopped, is saved, and goes on when the same command is run again."""

DISK_FAULTS = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "permission denied",
    errno.EPERM: "operation not permitted",
    errno.EROFS: "the file system is read-only",
}
"""What the user can mend of what an operating system says, by `OSError.errno`."""


def by_interrupt(error: BaseException) -> bool:
    """Whether an exception followed from a `KeyboardInterrupt`."""
    return came_of(error, KeyboardInterrupt)


def came_of(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether an exception is of a kind, or followed from one that is.

    What is interrupted may well raise another one on its way out: a file that is left unfinished, for example.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, kind):
            return True
        link = link.__cause__ or link.__context__
    return False
