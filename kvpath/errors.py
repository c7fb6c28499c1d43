"""The one exception for mistakes that the user can mend."""

from collections.abc import Iterable


class UserError(Exception):
    """A mistake recognised where it is made: the command line prints its message as one line and exits with 2.

    Say the field, the value and what would be right: ``d_ff must be positive, got -1``.
    """

    @classmethod
    def raise_all(cls, problems: Iterable[str]) -> None:
        """Raise every problem found in one place together, or nothing if there are none.

        Raises:
            UserError: if ``problems`` is not empty.
        """
        found = list(problems)
        if found:
            raise cls("; ".join(found))
