"""A report as Markdown, and as one HTML file that needs nothing else: no scripts, no network."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from kvpath.report.figures import file_name
from kvpath.report.plotting import Figure
from kvpath.report.tables import Table, as_html, as_markdown, escape_markdown


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    lines: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing but the heading."""
        return not (self.lines or self.tables or self.figures)


CHART_STYLE = """\
.chart { --ink: #1c2430; --soft: #5d6878; --grid: #e3e7ec; --paper: #fff;
  --c0: #2f6db3; --c1: #c96f13; --c2: #2f8a4b; --c3: #b2454f;
  --c4: #7a5aa8; --c5: #1d8c8c; --c6: #8a6116; --c7: #b8458c; }
@media (prefers-color-scheme: dark) { .chart { --ink: #e6e9ee; --soft: #a3adba; --grid: #303743; --paper: #171b21;
  --c0: #6ea8ec; --c1: #f0a35a; --c2: #6cc78a; --c3: #ee858f;
  --c4: #b79ae6; --c5: #5ecfcf; --c6: #d9ad5b; --c7: #ee8fc9; } }
.chart { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; background: var(--paper); }
.chart text { fill: var(--ink); }
.chart .tick { fill: var(--soft); }
.chart .grid { stroke: var(--grid); stroke-width: 1; }
.chart .line { fill: none; stroke: var(--k); stroke-width: 1.8; stroke-linejoin: round; }
.chart .thin { stroke-width: 1; opacity: .55; }
.chart .dashed { stroke-dasharray: 5 4; }
.chart .mark { fill: var(--k); stroke: var(--paper); stroke-width: 1; }
"""
CHART_STYLE += "".join(f".chart .k{number} {{ --k: var(--c{number}); }}\n" for number in range(8))

PAGE_STYLE = """\
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5d6878; --rule: #d5dae1; --paper: #fff; --shade: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --soft: #a3adba; --rule: #39414d; --paper: #171b21; --shade: #1f252d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem 1rem 4rem; max-width: 68rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: .5rem 0; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; padding-bottom: .25rem; border-bottom: 1px solid var(--rule); }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; font-size: .9rem; }
a { color: inherit; }
ul { padding-left: 1.2rem; }
figure { margin: 0 0 2rem; }
figcaption { font-weight: 600; margin-bottom: .4rem; }
.wide { overflow-x: auto; border: 1px solid var(--rule); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: left; vertical-align: top; white-space: nowrap; }
#matched td:nth-child(n+5) { white-space: normal; min-width: 9rem; }
#matched td:nth-child(5) { min-width: 16rem; }
th { border-bottom: 1px solid var(--rule); background: var(--shade); }
tr.block td { border-top: 1px solid var(--rule); }
.n { text-align: right; }
.printed { color: var(--soft); font-style: italic; }
.best { font-weight: 700; }
.note, .caption { color: var(--soft); font-size: .85rem; margin: .4rem 0 0; font-weight: 400; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem 2rem; }
.chart { width: 100%; height: auto; }
"""


def as_page(title: str, sections: Sequence[Section]) -> str:
    """The HTML file. All words are escaped: what files hold is shown, and never taken for markup."""
    sections = [section for section in sections if not section.is_empty]
    links = "".join(
        f'<a href="#s{index}">{html.escape(section.title)}</a>' for index, section in enumerate(sections, 1)
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{html.escape(title)}</title>",
            f"<style>\n{PAGE_STYLE}{CHART_STYLE}</style>",
            "</head>",
            "<body>",
            f"<h1>{html.escape(title)}</h1>",
            f"<nav>{links}</nav>",
            *(part for index, section in enumerate(sections, 1) for part in _section_html(index, section)),
            "</body>",
            "</html>",
            "",
        ]
    )


def as_text(title: str, sections: Sequence[Section]) -> str:
    """The Markdown file, whose figures lie beside it."""
    parts = [f"# {escape_markdown(title)}"]
    for section in sections:
        if not section.is_empty:
            parts.append(f"## {escape_markdown(section.title)}")
            parts += ["\n".join(f"- {escape_markdown(line)}" for line in section.lines)] * bool(section.lines)
            parts += [as_markdown(table) for table in section.tables]
            for figure in section.figures:
                parts.append(f"![{escape_markdown(figure.title)}]({file_name(figure)})")
                parts.append(escape_markdown(f"{figure.title}. {figure.caption}".strip()))
    return "\n\n".join(parts) + "\n"


def as_drawing(figure: Figure) -> str:
    """The SVG file of a figure, with its colours."""
    head, rest = figure.svg.split(">", 1)
    return f"{head}><style>{CHART_STYLE}</style>{rest}\n"


def _section_html(index: int, section: Section) -> list[str]:
    parts = [f'<h2 id="s{index}">{html.escape(section.title)}</h2>']
    if section.lines:
        parts.append(f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in section.lines)}</ul>")
    parts += map(as_html, section.tables)
    if section.figures:
        parts.append(f'<div class="charts">{"".join(map(_figure_html, section.figures))}</div>')
    return parts


def _figure_html(figure: Figure) -> str:
    caption = f'<p class="caption">{html.escape(figure.caption)}</p>' * bool(figure.caption)
    return (
        f'<figure id="{html.escape(figure.name)}"><figcaption>{html.escape(figure.title)}</figcaption>'
        f"{figure.svg}{caption}</figure>\n"
    )
