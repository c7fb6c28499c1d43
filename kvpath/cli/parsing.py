"""Parsers whose mistakes come out as one line that names the key and the nearest valid one."""

import re
from difflib import get_close_matches
from typing import Any, NoReturn

from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser

from kvpath.attention import AttentionStrategy, OutputProjection
from kvpath.data.sources import Source
from kvpath.errors import UserError


def allow_choice_by_class() -> None:
    """Let YAML choose strategies, output projections and sources by `class_path`, short for those that are imported.

    And those alone: a configuration may come from anyone, and jsonargparse would make an object of any class that
    stands where any value may. This sets globals of it, so only a command calls it, never an import.
    """
    set_parsing_settings(
        subclasses_enabled=[AttentionStrategy, OutputProjection, Source], instantiate_subclass_spec_in_any=False
    )


class PlainErrorParser(LightningArgumentParser):
    """Raises `UserError` instead of printing its usage, and takes a short form of a key for what it is: unknown."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Give the cause and, for an unknown key, the nearest known one."""
        if isinstance(ex, ArgumentError | None) and ex is not None and isinstance(ex.__cause__, UserError):
            raise ex.__cause__
        raise UserError(_one_line(message) + _nearest(message, self)) from None


def _one_line(message: str) -> str:
    return re.sub(r"\s+", " ", message).strip()


_UNKNOWN_KEY = (
    r"unrecognized arguments: --([\w.]+)",
    r"Option '([\w.]+)' is not accepted",
    r"does not accept option '([\w.]+)'",
    r"[Kk]ey '?\"?([\w.]+)\"?'? is not expected",
)


def _nearest(message: str, parser: ArgumentParser) -> str:
    found = next((match for pattern in _UNKNOWN_KEY if (match := re.search(pattern, message))), None)
    if found is None:
        return ""
    key = found.group(1)
    known = sorted(known_keys(parser))
    close = get_close_matches(key, known, n=1)
    if not close:
        leaves = {name.rsplit(".", 1)[-1]: name for name in known}
        close = [leaves[leaf] for leaf in get_close_matches(key.rsplit(".", 1)[-1], leaves, n=1)]
    return f"; did you mean {close[0]}?" if close else ""


def known_keys(parser: ArgumentParser) -> set[str]:
    """All dotted keys that a parser or its subcommands take, and the fields of every strategy."""
    keys = {action.dest for action in parser._actions if action.dest}
    for action in parser._actions:
        for subparser in action.choices.values() if isinstance(action.choices, dict) else ():
            keys |= known_keys(subparser)
    strategies = [AttentionStrategy, *_subclasses(AttentionStrategy)]
    return keys | {field for strategy in strategies for field in getattr(strategy, "__dataclass_fields__", {})}


def _subclasses(kind: type) -> list[type]:
    below: list[type] = kind.__subclasses__()
    return below + [deeper for one in below for deeper in _subclasses(one)]
