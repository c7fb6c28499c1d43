"""`kvpath reproduce`: the paper's studies at a fraction of their size, as a file for `kvpath series`."""

from fractions import Fraction
from pathlib import Path

from kvpath.cli.arguments import Arguments
from kvpath.errors import UserError
from kvpath.series.reproduce import STUDIES, Reproduction


def reproduce(argv: list[str]) -> int:
    """Run `kvpath reproduce` with the arguments after the subcommand; gives the exit code.

    Raises:
        UserError: an argument is wrong, or other files lie where these would go.
    """
    parser = Arguments("reproduce", "Write the pieces and the file of a series for one of the paper's studies.")
    parser.add_argument("study", choices=list(STUDIES), help="main and MLA tables, or the ablations of path and delta")
    parser.add_argument(
        "--scale", default="1", metavar="F", help="of heads, widths, tokens and warm-up, such as 1/4 (1)"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write; reproduce/STUDY-SCALE by default")
    parser.add_argument("--data", nargs="+", default=["data/fineweb_edu"], metavar="PIECE", help="the text")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="how many (3)")
    parser.add_argument("--tokens", type=float, metavar="N", help="of the first stage; later ones have a tenth")
    parser.add_argument("--search", action="store_true", help="search a learning rate for each layout first")
    arguments = parser.parse_args(argv)
    try:
        scale = Fraction(arguments.scale)
    except (ValueError, ZeroDivisionError) as error:
        raise UserError(f"--scale must be a fraction such as 1/4, got {arguments.scale}") from error
    output = arguments.output or Path("reproduce") / f"{arguments.study}-{str(scale).replace('/', 'of')}"
    given = (tuple(arguments.data), arguments.seeds, arguments.tokens, arguments.search)
    file = Reproduction(arguments.study, scale, output, *given).write()
    print(f"{file}: next, kvpath series plan {file} --peak_flops 989e12, and kvpath series run {file}")
    return 0
