"""``kvpath report``: a folder of runs as the paper's tables and figures, ours beside the printed ones."""

import sys
from pathlib import Path

from kvpath.cli.arguments import Arguments


def report_command(argv: list[str]) -> int:
    """Run ``kvpath report`` with the arguments after the subcommand; returns the exit code.

    Raises:
        UserError: there are no runs, an option is wrong, or two runs cannot stand in one table.
    """
    from kvpath.report.report import FORMATS, report_of, write_report

    parser = Arguments(
        "report",
        "Reads all runs below folders (config.yaml, metrics.jsonl, summary.json, perplexity.json, retrieval.json; no"
        " weights) and writes tables, figures and tests over seeds: Markdown, LaTeX, CSV, and one HTML file.",
        "Runs that are not finished are in the curves alone. Runs are called matched only if parameters (within 0.05%),"
        " stored elements, tokens, the stream of training tokens and the tokens of the evaluation are equal.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="where runs are, however deep")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write (report, in the first folder)")
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS), help="all by default")
    parser.add_argument(
        "--reference", nargs="+", default=[], metavar="ARM", help="what others are compared with (gqa, if there is one)"
    )
    parser.add_argument("--mixed", action="store_true", help="tables apart for runs evaluated on different tokens")
    args = parser.parse_args(argv)
    report = report_of(args.folders, args.reference, args.mixed)
    for line in report.left_out:
        print(line, file=sys.stderr)
    written = write_report(report, args.output or args.folders[0] / "report", args.format)
    print(f"{report.runs} runs in the tables: {', '.join(map(str, written))}")
    return 0
