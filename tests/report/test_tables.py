"""A table in its four forms, and what files hold is never taken for markup."""

import csv

import pytest

from kvpath.report.tables import EMPTY, Table, as_csv, as_html, as_latex, as_markdown, count, number, text

HOSTILE = "<script>alert(1)</script>|a_b*&%$#\\"
TABLE = Table(
    "sizes",
    "Sizes",
    ("Arm", "Parameters", "Perplexity"),
    (
        (text("GQA"), count(98_710_016), number(30.94321, 2, 0.104)),
        (text(HOSTILE), EMPTY, number(29.98, printed=True, best=True)),
    ),
    ("A note.",),
)


def test_markdown() -> None:
    assert as_markdown(TABLE).splitlines() == [
        "**Sizes**",
        "",
        "| Arm | Parameters | Perplexity |",
        "| --- | ---: | ---: |",
        "| GQA | 98,710,016 | 30.94 ± 0.10 |",
        r"| \<script\>alert(1)\</script\>\|a\_b\*&%\$\#\\ | – | **29.98** |",
        "",
        "A note.",
    ]


def test_csv_is_not_rounded_and_gives_deviations_a_column() -> None:
    assert list(csv.reader(as_csv(TABLE).splitlines())) == [
        ["Arm", "Parameters", "Perplexity", "Perplexity (deviation)"],
        ["GQA", "98710016", "30.94321", "0.104"],
        [HOSTILE, "", "29.98", ""],
    ]


def test_latex() -> None:
    lines = as_latex(TABLE).splitlines()
    assert r"\begin{tabular}{@{}lrr@{}}" in lines
    assert r"GQA & 98,710,016 & 30.94 $\pm$ 0.10 \\" in lines
    assert (
        r"\textless{}script\textgreater{}alert(1)\textless{}/script\textgreater{}\textbar{}a\_b*\&\%\$\#"
        r"\textbackslash{} & -- & \textbf{29.98} \\"
    ) in lines


def test_html_escapes_and_marks() -> None:
    page = as_html(TABLE)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert '<td class="n printed best">29.98</td>' in page


def test_rows_must_fit_the_columns() -> None:
    with pytest.raises(ValueError, match="2 cells under 1 columns"):
        Table("x", "X", ("A",), ((EMPTY, EMPTY),))
