"""Finding the YAML pieces that ``-c`` names: a local file first, else one that is shipped with kvpath."""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from kvpath.errors import UserError


def root() -> Path:
    """The folder of the shipped pieces: ``kvpath/configs`` in a wheel, ``configs`` beside ``kvpath`` in a checkout."""
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def available() -> dict[str, str]:
    """Every shipped piece, sorted: its name (``attention/gqa``) and the first comment line of its file ("" if none)."""
    files = sorted(root().rglob("*.yaml"))
    return {file.relative_to(root()).with_suffix("").as_posix(): _first_comment(file) for file in files}


def directly_in(folder: str) -> list[str]:
    """The pieces of a folder without those of folders in it: ``attention`` are the paper's, not ``attention/1b``."""
    return [name for name in available() if PurePosixPath(name).parent == PurePosixPath(folder)]


def shipped(name: str) -> Path:
    """The file of a shipped piece, named with or without ``.yaml``.

    Raises:
        UserError: there is no such piece; names the nearest ones.
    """
    names = list(available())
    wanted = name.removesuffix(".yaml")
    if wanted in names:
        return root() / f"{wanted}.yaml"
    nearest = _nearest(wanted, names)
    hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
    raise UserError(f"no file and no shipped piece is called {name!r}: {hint}`kvpath configs` lists the pieces")


def resolve(name: str) -> Path:
    """The file that ``-c name`` means: ``name``, else ``name.yaml``, else the shipped piece of that name.

    Raises:
        UserError: none of the three exists; names the nearest pieces.
    """
    for local in (Path(name), Path(f"{name}.yaml")):
        if local.is_file():
            return local
    return shipped(name)


def resolve_argv(argv: list[str]) -> list[str]:
    """A copy of ``argv`` in which the values of ``-c X``, ``--config X``, ``-c=X`` and ``--config=X`` are files' paths.

    A flag that lacks its value stays as it is, for the parser to report.

    Raises:
        UserError: a value is neither a file nor a piece.
    """
    resolved: list[str] = []
    for argument in argv:
        flag, equals, value = argument.partition("=")
        if equals and flag in ("-c", "--config"):
            argument = f"{flag}={resolve(value)}"
        elif resolved and resolved[-1] in ("-c", "--config") and not argument.startswith("-"):
            argument = str(resolve(argument))
        resolved.append(argument)
    return resolved


def compose(files: Iterable[Path], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The plain values of pieces, later ones over earlier ones, and of dotted overrides over all: `--a.b=c`, `--a.b c`.

    Values are as YAML has them: nothing is checked.
    """
    whole: dict[str, Any] = {}
    for file in files:
        whole = merged(whole, read(file.read_text(encoding="utf-8")) or {})
    rest = iter(overrides)
    for argument in rest:
        flag, equals, text = argument.partition("=")
        value = read(text if equals else next(rest, ""))
        for part in reversed(flag.removeprefix("--").split(".")):
            value = {part: value}
        whole = merged(whole, value)
    return whole


def read(text: str) -> Any:
    """YAML as the command line reads it: 5e9 is a number without a point or a sign, too."""
    return yaml.load(text, _Numbers)


class _Numbers(yaml.SafeLoader):
    pass


_Numbers.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries, those of `over` going into those of `under`."""
    both = dict(under)
    for key, value in over.items():
        both[key] = merged(both[key], value) if isinstance(value, dict) and isinstance(both.get(key), dict) else value
    return both


def _first_comment(file: Path) -> str:
    with file.open(encoding="utf-8") as lines:
        return next((line.lstrip("# ").rstrip() for line in lines if line.startswith("#")), "")


def _nearest(wanted: str, names: list[str]) -> list[str]:
    """The names close to ``wanted`` as a whole, and those whose last part is close to its last part."""
    last_parts = {PurePosixPath(name).name for name in names}
    close_parts = get_close_matches(PurePosixPath(wanted).name, last_parts)
    same_part = [name for name in names if PurePosixPath(name).name in close_parts]
    return list(dict.fromkeys(get_close_matches(wanted, names) + same_part))[:3]
