"""From runs to a report, and from a report to files."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from kvpath.report.arms import Arm, arms_of, references
from kvpath.report.figures import figures_of, file_name
from kvpath.report.general import COMPARED, difference_table, perplexity_tables, retrieval_tables, runs_table
from kvpath.report.matched import comparisons_of, matched_table
from kvpath.report.page import Section, as_drawing, as_page, as_text
from kvpath.report.paper import paper_tables
from kvpath.report.runs import Run, read_runs
from kvpath.report.searches import is_of_search, read_searches, search_table
from kvpath.report.sheets import sheets_of
from kvpath.report.tables import FORMS, Table
from kvpath.training.whole_files import write_whole
from kvpath.version import __version__

FORMATS = ("md", "html", "tex", "csv")
TITLE = "kvpath report"


@dataclass(frozen=True)
class Report:
    """All that is said of some runs."""

    sections: tuple[Section, ...]
    left_out: tuple[str, ...]
    """Runs and results that are not in the tables, and why."""

    runs: int
    """How many are in the tables."""

    @property
    def tables(self) -> list[Table]:
        """All of them."""
        return [table for section in self.sections for table in section.tables]


def report_of(folders: Sequence[Path], reference: Sequence[str] = (), mixed: bool = False) -> Report:
    """Read the runs below `folders` and put together what there is to say.

    Args:
        folders: each with run directories somewhere below, or one itself.
        reference: the arms that others are compared with, by layout or whole name; none for GQA, if there is one.
        mixed: allow results on different tokens, in tables of their own.

    Raises:
        UserError: there are no runs, no arm is called `reference`, or two runs cannot stand in one table.
    """
    found, unreadable = read_runs(folders)
    runs = [run for run in found if not is_of_search(run, folders)]
    everything, doubled = arms_of(runs)  # named together, so that a colour is one arm's in all figures
    arms, unfinished = _parted(everything)
    wanted = references(everything, reference)
    sheets, unused = sheets_of(arms, mixed)
    comparisons = comparisons_of(arms, sheets, wanted)
    not_done = [_unfinished_line(run) for arm in unfinished for run in arm.runs]
    left_out = (*unreadable, *doubled, *not_done, *unused)
    searched = search_table(read_searches(folders))
    differences = []
    for kind, (number, name), (index, sheet) in product(COMPARED, enumerate(wanted, 1), enumerate(sheets, 1)):
        with_it = [comparison for comparison in comparisons if comparison.wanted == name]
        title = f"{kind}-{number}-{index}"
        if sheet.comparable and (table := difference_table(title, sheet, with_it, COMPARED[kind])):
            differences.append(table)
    in_tables = sum(len(arm.runs) for arm in arms)
    about = (
        f"{in_tables} finished runs of {len(arms)} arms, below {', '.join(map(str, folders))}",
        f"compared with: {', '.join(wanted) or 'nothing, for there is no GQA among them; --reference names an arm'}",
        f"written by kvpath {__version__}",
    )
    sections = (
        Section("About", about),
        Section("Left out", left_out),
        Section("Runs", tables=(*([runs_table(arms)] if arms else []), *([searched] if searched else []))),
        Section("Results", tables=(*perplexity_tables(arms, sheets), *retrieval_tables(arms))),
        Section("Differences", tables=tuple(differences)),
        Section("Matched or not", tables=(matched_table(comparisons),) if comparisons else ()),
        Section("Figures", figures=tuple(figures_of(arms, sheets, unfinished, comparisons))),
        Section("The paper's tables", tables=tuple(paper_tables(arms, sheets))),
    )
    return Report(sections, left_out, in_tables)


def write_report(report: Report, output: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write the files of each format; gives the ones to open: the pages, and the folders of tables."""
    output.mkdir(parents=True, exist_ok=True)
    written = []
    if "md" in formats:
        (output / "figures").mkdir(exist_ok=True)
        for figure in (figure for section in report.sections for figure in section.figures):
            write_whole(output / file_name(figure), as_drawing(figure))
        written.append(output / "report.md")
        write_whole(written[-1], as_text(TITLE, report.sections))
    if "html" in formats:
        written.append(output / "report.html")
        write_whole(written[-1], as_page(TITLE, report.sections))
    for ending in (ending for ending in FORMS if ending in formats):
        folder = output / ending
        folder.mkdir(exist_ok=True)
        for table in report.tables:
            write_whole(folder / f"{table.name}.{ending}", FORMS[ending](table))
        written.append(folder)
    return written


def _parted(arms: Sequence[Arm]) -> tuple[list[Arm], list[Arm]]:
    """The finished runs of each arm, and those that are not."""
    parts: tuple[list[Arm], list[Arm]] = ([], [])
    for arm in arms:
        for part, finished in zip(parts, (True, False), strict=True):
            runs = tuple(run for run in arm.runs if run.finished == finished)
            if runs:
                part.append(Arm(arm.name, arm.layout, arm.values, runs))
    return parts


def _unfinished_line(run: Run) -> str:
    planned = "it has no summary.json" if run.planned_steps is None else f"{run.planned_steps:,} are planned"
    return f"{run.path} is not finished, and in the curves alone: step {run.step:,}, {planned}"
