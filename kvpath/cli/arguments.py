"""Plain command lines whose mistakes are one line."""

import argparse
from typing import NoReturn

from kvpath.errors import UserError


class Arguments(argparse.ArgumentParser):
    """Raises `UserError` instead of printing its usage; takes no short forms of its options."""

    def __init__(self, command: str, description: str, epilog: str | None = None) -> None:
        """Named as the command is called."""
        super().__init__(prog=f"kvpath {command}", description=description, epilog=epilog, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """The message alone."""
        raise UserError(f"{self.prog}: {message}")
