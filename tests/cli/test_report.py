"""The files that `kvpath report` writes."""

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.report.made import CONCAT, GQA, make_run
from tests.runs import kvpath

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


class Tags(HTMLParser):
    """All tags, and all attributes that could run or load something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.open: list[str] = []
        self.suspicious: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)
        self.suspicious += [name for name, _ in attrs if name.startswith("on") or name in ("src", "action")]
        self.suspicious += [
            value or "" for name, value in attrs if name == "href" and not (value or "").startswith("#s")
        ]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    for seed in (0, 1):
        make_run(folder / f"gqa{seed}", GQA, seed, {("c4", 64): 30.0})
        hostile = {**CONCAT, "init_args": {**CONCAT["init_args"]}}
        place = folder / f"a<b>{seed}"
        make_run(place, hostile, seed, {("c4", 64): 29.0 - seed, (HOSTILE, 64): 20.0}, name=HOSTILE, recall=True)
    make_run(folder / "x<script>alert(3)<", GQA, 2, planned=None)
    return folder


def test_one_page_without_scripts_or_network(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvpath("report", str(runs)) == 0
    page = (runs / "report" / "report.html").read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    assert not tags.found & {"script", "img", "link", "iframe", "object", "b"}
    assert not tags.suspicious
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "alert(3)" in page
    assert set(re.findall(r"https?://[^\"' <]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in page
    said = capsys.readouterr()
    assert "is not finished" in said.err
    assert said.out.startswith("4 runs in the tables: ")


def test_files_of_each_format(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert kvpath("report", str(runs), "--output", str(out)) == 0
    markdown = (out / "report.md").read_text(encoding="utf-8")
    figures = re.findall(r"\]\((figures/[\w.-]+\.svg)\)", markdown)
    assert figures
    for figure in figures:
        assert ElementTree.parse(out / figure).getroot().tag.endswith("svg")
    assert "<script>" not in markdown
    main = (out / "csv" / "paper-main.csv").read_text(encoding="utf-8").splitlines()
    assert main[1] == "2K,GQA,printed,35.67,21.94,32.56,33.58,30.94"
    assert main[2] == "2K,GQA,ours,,,,,"
    assert r"2K & GQA & \textit{printed} & \textit{35.67}" in (out / "tex" / "paper-main.tex").read_text(
        encoding="utf-8"
    )


def test_formats_can_be_chosen_and_a_report_is_no_run(runs: Path, tmp_path: Path) -> None:
    out = runs / "report"
    for _ in range(2):
        assert kvpath("report", str(runs), "--format", "csv", "html") == 0
        assert {path.name for path in out.iterdir()} == {"csv", "report.html"}


def test_the_same_runs_give_the_same_bytes(runs: Path, tmp_path: Path) -> None:
    pages = []
    for name in ("one", "two"):
        assert kvpath("report", str(runs), "--output", str(tmp_path / name)) == 0
        pages.append((tmp_path / name / "report.html").read_bytes())
    assert pages[0] == pages[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--reference", "mha"], "--reference mha: no arm is called so; there are GQA; KVPath-Concat"),
        (["--format", "pdf"], "invalid choice: 'pdf'"),
        (["--nothing"], "unrecognized arguments: --nothing"),
    ],
)
def test_mistakes_are_one_line(options: list[str], said: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvpath("report", str(runs), *options) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_folder_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvpath("report", str(tmp_path)) == 2
    assert f"no run (a folder with a config.yaml and a metrics.jsonl) in {tmp_path}" in capsys.readouterr().err
