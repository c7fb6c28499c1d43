"""A table as one value, and what becomes of it: Markdown, LaTeX, CSV, HTML."""

import csv
import html
import io
import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """What one place of a table shows, and the number behind it."""

    text: str
    value: float | int | None = None
    """Unrounded, for CSV; None for text."""

    spread: float | None = None
    """Standard deviation over seeds, shown after ±."""

    printed: bool = False
    """Whether this is a figure of the paper, not ours."""

    best: bool = False
    """Shown in bold."""


EMPTY = Cell("–")


@dataclass(frozen=True)
class Table:
    """Rows of cells under one heading each."""

    name: str
    """Of its files."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    """What a reader must know, one line each."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.name}: {len(row)} cells under {len(self.columns)} columns")

    def is_numeric(self, column: int) -> bool:
        """Whether a column holds numbers, which stand on the right."""
        return any(row[column].value is not None for row in self.rows)


def text(words: object) -> Cell:
    """A cell of words."""
    return Cell(str(words))


def count(value: float | int | None, printed: bool = False) -> Cell:
    """A whole number, thousands separated; of others, one digit behind the point."""
    if value is None:
        return EMPTY
    return Cell(f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}", value, printed=printed)


def number(
    value: float | None, digits: int = 2, spread: float | None = None, printed: bool = False, best: bool = False
) -> Cell:
    """A number with `digits` behind the point, and its standard deviation."""
    if value is None:
        return EMPTY
    shown = f"{value:,.{digits}f}" + (f" ± {spread:,.{digits}f}" if spread is not None else "")
    return Cell(shown, value, spread, printed, best)


def as_markdown(table: Table) -> str:
    """With title and notes."""
    lines = [
        _markdown_row([escape_markdown(column) for column in table.columns]),
        _markdown_row(["---:" if table.is_numeric(index) else "---" for index in range(len(table.columns))]),
        *(_markdown_row([_markdown_cell(cell) for cell in row]) for row in table.rows),
    ]
    parts = [f"**{escape_markdown(table.title)}**", "\n".join(lines), *map(escape_markdown, table.notes)]
    return "\n\n".join(parts)


def as_csv(table: Table) -> str:
    """Numbers are not rounded; a column with deviations is followed by theirs."""
    spreads = [any(row[column].spread is not None for row in table.rows) for column in range(len(table.columns))]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")

    def line(parts: list[list[str]]) -> None:
        writer.writerow([part for pair, spread in zip(parts, spreads, strict=True) for part in pair[: 1 + spread]])

    line([[column, f"{column} (deviation)"] for column in table.columns])
    for row in table.rows:
        line([[_plain(cell), "" if cell.spread is None else repr(cell.spread)] for cell in row])
    return file.getvalue()


def as_latex(table: Table) -> str:
    r"""A `table` with `booktabs`' rules, to be \input."""
    columns = "".join("r" if table.is_numeric(index) else "l" for index in range(len(table.columns)))
    rows = [_latex_row([escape_latex(column) for column in table.columns]), r"\midrule"]
    for index, row in enumerate(table.rows):
        if index and _starts_block(table, index):
            rows.append(r"\midrule")
        rows.append(_latex_row([_latex_cell(cell) for cell in row]))
    caption = escape_latex(" ".join((f"{table.title.rstrip('.')}.", *table.notes)))
    return "\n".join(
        [
            "% Requires \\usepackage{booktabs} in the preamble.",
            r"\begin{table}[t]",
            r"\centering",
            r"\small",
            rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}",
            r"\toprule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            rf"\caption{{{caption}}}",
            rf"\label{{tab:{table.name}}}",
            r"\end{table}",
            "",
        ]
    )


def as_html(table: Table) -> str:
    """A figure element with its caption, in a frame that scrolls sideways."""
    numeric = [table.is_numeric(index) for index in range(len(table.columns))]
    classes = [' class="n"' if right else "" for right in numeric]
    head = "".join(f"<th{kind}>{html.escape(column)}</th>" for column, kind in zip(table.columns, classes, strict=True))
    body = []
    for index, row in enumerate(table.rows):
        start = ' class="block"' if index and _starts_block(table, index) else ""
        cells = "".join(_html_cell(cell, right) for cell, right in zip(row, numeric, strict=True))
        body.append(f"<tr{start}>{cells}</tr>")
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in table.notes)
    lines = "\n".join(body)
    return (
        f'<figure class="table" id="{html.escape(table.name)}"><figcaption>{html.escape(table.title)}</figcaption>'
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{lines}\n</tbody></table></div>'
        f"{notes}</figure>"
    )


FORMS: dict[str, Callable[[Table], str]] = {"csv": as_csv, "tex": as_latex}
"""The forms that have a file for each table, by its ending."""


def escape_markdown(words: str) -> str:
    """Words that mean nothing to Markdown, on one line."""
    return re.sub(r"([\\`*_\[\]<>|#~$])", r"\\\1", " ".join(words.split()))


def escape_latex(words: str) -> str:
    """Words that mean nothing to LaTeX, on one line."""
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(words.split()))


_LATEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "–": "--",
    "−": "$-$",
    "×": r"$\times$",
}


def _starts_block(table: Table, index: int) -> bool:
    """Rows with one first cell belong together."""
    heads = [row[0].text for row in table.rows]
    return heads[index] != heads[index - 1] and len(set(heads)) < len(heads)


def _plain(cell: Cell) -> str:
    if cell == EMPTY:
        return ""
    return cell.text if cell.value is None else repr(cell.value)


def _markdown_row(parts: list[str]) -> str:
    return f"| {' | '.join(parts)} |"


def _markdown_cell(cell: Cell) -> str:
    shown = escape_markdown(cell.text)
    if cell.best:
        return f"**{shown}**"
    return f"*{shown}*" if cell.printed else shown


def _latex_row(parts: list[str]) -> str:
    return " & ".join(parts) + r" \\"


def _latex_cell(cell: Cell) -> str:
    shown = escape_latex(cell.text)
    if cell.best:
        return rf"\textbf{{{shown}}}"
    return rf"\textit{{{shown}}}" if cell.printed else shown


def _html_cell(cell: Cell, right: bool) -> str:
    kinds = " ".join(kind for kind, holds in (("n", right), ("printed", cell.printed), ("best", cell.best)) if holds)
    shown = html.escape(cell.text)
    return f'<td class="{kinds}">{shown}</td>' if kinds else f"<td>{shown}</td>"
