"""`kvpath series`: a study of many runs from one file."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kvpath.cli.arguments import Arguments
from kvpath.errors import UserError
from kvpath.series import study as file_format
from kvpath.series.study import Study

if TYPE_CHECKING:
    from kvpath.series.state import Progress

ACTIONS = {
    "plan": "print every command, with hours, GPU-hours and disk",
    "run": "run what is left to do; may be started many times at once, on all machines that see the directory",
    "status": "how far each run is",
    "submit": "hand what is left to do to SLURM, as an array for each stage",
    "chosen": "print what the search has chosen for a value of its axis",
}

_ABOUT = f"""\
{{run, plan, status, submit, chosen}} FILE: a study of many runs.

{(file_format.__doc__ or "").partition(chr(10))[2]}
What is done is not done again, and what was killed goes on. A run whose configuration is another one than when it was
trained is named and left as it is.
"""


def series(argv: list[str]) -> int:
    """Run `kvpath series` with the arguments after the subcommand; gives the exit code.

    Raises:
        UserError: if the series file is wrong, or a piece is not there.
    """
    parser = _parser(argv[0] if argv else "")
    arguments, overrides = parser.parse_known_args(argv)
    if (workers := getattr(arguments, "workers", 1)) < 1:
        raise UserError(f"--workers must be positive, got {workers}")
    study = Study.read(arguments.file)
    from kvpath.cli.running import quieten
    from kvpath.series.state import Progress

    quieten()
    progress = Progress(study, overrides)
    if arguments.action == "plan":
        from kvpath.series.estimate import Rate, plan_lines

        rate = Rate(arguments.peak_flops, arguments.utilisation, arguments.tokens_per_second, arguments.devices)
        for line in plan_lines(progress, rate, arguments.workers):
            print(line)
        return 0
    if arguments.action == "status":
        from kvpath.series.status import status

        print(status(progress))
        return 0
    if arguments.action == "chosen":
        return _chosen(progress, arguments.value)
    if arguments.action == "submit":
        from kvpath.series.slurm import submit

        return submit(progress, arguments.sbatch, arguments.dry_run)
    if arguments.minutes is not None and not arguments.minutes > 0:
        raise UserError(f"--minutes must be positive, got {arguments.minutes}")
    from kvpath.series.worker import Workers

    return Workers(progress, arguments.workers).run(arguments.minutes)


def _parser(action: str) -> Arguments:
    parser = Arguments(
        "series",
        description=_ABOUT,
        epilog="Other options override the configuration of every run and test, such as --trainer.devices 8.",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "action", choices=list(ACTIONS), help="; ".join(f"{name}: {does}" for name, does in ACTIONS.items())
    )
    parser.add_argument("file", type=Path, help="the series file")
    # The options of one action are another one's overrides: --peak_flops is a key of a configuration, too.
    every = action not in ACTIONS
    if every or action in ("run", "plan"):
        parser.add_argument("--workers", type=int, default=1, metavar="N", help="run, plan: jobs at once (1)")
    if every or action == "run":
        parser.add_argument("--minutes", type=float, metavar="M", help="run: after so many, save, end with 75")
    if every or action == "plan":
        parser.add_argument("--peak_flops", type=float, metavar="F", help="plan: of a device, such as 989e12")
        parser.add_argument("--utilisation", type=float, default=0.4, metavar="X", help="plan: share reached (0.4)")
        parser.add_argument("--tokens_per_second", type=float, metavar="R", help="plan: measured on one device")
        parser.add_argument("--devices", type=int, metavar="N", help="plan: of each run; as it states by default")
    if every or action == "submit":
        parser.add_argument("--dry-run", action="store_true", help="submit: write the arrays, print, submit nothing")
        parser.add_argument("--sbatch", default="", metavar="OPTIONS", help="submit: more for sbatch, one string")
    if every or action == "chosen":
        parser.add_argument("value", nargs=None if action == "chosen" else "?", help="chosen: a value of the axis")
    return parser


def _chosen(progress: "Progress", value: str) -> int:
    study = progress.study
    if study.search is None:
        raise UserError(f"series {study.file}: there is no search in it")
    known = [choice.value for choice in study.axes[study.search.axis]]
    if value not in known:
        raise UserError(f"series chosen: {value} is not a value of {study.search.axis}; there are {', '.join(known)}")
    found = progress.decision(value)
    if found is None:
        raise UserError(f"the search for {value} is not decided: its runs in {study.run / 'search'} have not all ended")
    print(found)
    return 0
