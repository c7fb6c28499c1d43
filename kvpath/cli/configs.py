"""``kvpath configs``: lists, prints and copies the YAML pieces that are shipped with kvpath."""

from pathlib import Path

from kvpath import pieces
from kvpath.cli.arguments import Arguments
from kvpath.errors import UserError


def configs(argv: list[str]) -> int:
    """Run ``kvpath configs`` with the arguments after the subcommand; returns the exit code.

    Raises:
        UserError: there is no such piece, or its copy cannot be written.
    """
    parser = Arguments(
        "configs",
        "Lists the YAML pieces that come with kvpath; with a NAME, prints that piece or copies it.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a piece, such as attention/gqa")
    parser.add_argument("--copy", nargs="?", const=".", metavar="DIR", help="copy it to DIR/NAME.yaml (DIR: here)")
    args = parser.parse_args(argv)
    if args.name is None:
        if args.copy is not None:
            parser.error("--copy needs the NAME of a piece")
        _list()
    elif args.copy is None:
        print(pieces.shipped(args.name).read_text(encoding="utf-8"), end="")
    else:
        print(_copy(args.name, Path(args.copy)))
    return 0


def _list() -> None:
    available = pieces.available()
    width = max(map(len, available), default=0)
    for name, comment in available.items():
        print(f"{name:{width}}  {comment}".rstrip())


def _copy(name: str, folder: Path) -> Path:
    source = pieces.shipped(name)
    target = folder / source.relative_to(pieces.root())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError as error:
        raise UserError(f"--copy does not overwrite: {error.filename} exists already") from error
    except OSError as error:
        raise UserError(f"--copy cannot write {target}: {error.strerror}") from error
    return target
