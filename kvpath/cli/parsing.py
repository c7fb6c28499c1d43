"""Parsers whose mistakes come out as one line that names the key and the nearest valid one."""

import re
from difflib import get_close_matches
from textwrap import dedent, indent
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
    """What jsonargparse says of a value, in one line of words; what it says of anything else, in one line."""
    head, _, rest = message[message.rfind('Parser key "') :].partition("\n")
    inmost = f"{head}\n{indent(dedent(rest), '  ')}"
    if (union := _NO_SUCH_VALUE.search(inmost)) is not None:
        errors = [error.removeprefix("    - ") for error in union["errors"].splitlines() if error.startswith("    - ")]
        return _of_union(union["key"], errors, union["value"])
    for pattern in (_WRONG_VALUE, _NO_OBJECT, _NO_CLASS):
        if (found := pattern.search(inmost)) is not None:
            kind = _spoken(found["kind"]) if pattern is not _NO_CLASS else "the name of a class"
            return f"{found['key']} must be {kind}, got {found['value']}{_close_class(found['value'])}"
    return re.sub(r"\s+", " ", message).strip()


def _of_union(key: str, errors: list[str], value: str) -> str:
    """Of a field that may be one of several kinds: what each of them says."""
    kinds = [found["kind"] for error in errors if (found := _EXPECTED.fullmatch(error)) is not None]
    said = [error for error in errors if _EXPECTED.fullmatch(error) is None]
    if said and (part := _WRONG_PART.match(said[-1])) is not None:
        return f"{key}: {part['value']} must be {_spoken(part['kind'])}"
    if said:  # by a parser within, as here
        return f"{key}{'.' if ' must be ' in said[-1] else ': '}{said[-1]}"
    if (field := _NESTED.fullmatch(value)) is not None:
        return f"{key}.{field['key']} cannot be {field['value']}: {key} is nothing that has such a field"
    return f"{key} must be {' or '.join(map(_spoken, kinds))}, got {value}"


_KEY = r"Parser key \"(?P<key>[\w.]+)\":"
_WRONG_VALUE = re.compile(_KEY + r"\s+Expected an? (?P<kind>.+)\. Got value: (?P<value>.+)$")
_NO_OBJECT = re.compile(_KEY + r".*?Not a valid subclass of (?P<kind>\w+)\. Got value: (?P<value>.*?)\n", re.DOTALL)
_NO_CLASS = re.compile(_KEY + r".*Expected a dot import path string: (?P<value>.+)$", re.DOTALL)
_NO_SUCH_VALUE = re.compile(
    _KEY + r".*?Does not validate against any of the Union subtypes\s+Subtypes: .*?"
    r"\s+Errors:\n(?P<errors>.*)\n\s+Given value type: .*?\n\s+Given value: (?P<value>.*)$",
    re.DOTALL,
)
_EXPECTED = re.compile(r"Expected an? (?P<kind>(?:(?!Got value).)+)")
_WRONG_PART = re.compile(r"(?:Expected an?|Not a valid subclass of) (?P<kind>.+)\. Got value: (?P<value>.+)$")
_NESTED = re.compile(r"NestedArg\(key='(?P<key>.*)', val='(?P<value>.*)'\)")
"""How the parser says it."""

_SPOKEN = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "dict": "keys with values",
    "NoneType": "null",
}


def _spoken(kind: str) -> str:
    """A type, as jsonargparse prints it, in words."""
    if (found := re.fullmatch(r"<class '(?:[\w.]+\.)?(\w+)'>", kind)) is not None:
        return _SPOKEN.get(found[1]) or _spoken(found[1])
    if kind.startswith("typing.Literal["):
        return kind.removeprefix("typing.Literal[").removesuffix("]").replace(", ", " or ")
    if kind.startswith("dot import path"):
        return "the path of a class"
    return f"a{'n' * kind.startswith(tuple('AEIOU'))} {kind}"


def _close_class(name: str) -> str:
    """The nearest that a configuration may choose by class."""
    known = [kind.__name__ for base in (AttentionStrategy, OutputProjection, Source) for kind in _subclasses(base)]
    close = get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


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
