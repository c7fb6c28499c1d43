"""Runs that a series has trained to choose a setting stand apart in a report."""

import json
from pathlib import Path

import pytest

from kvpath.errors import UserError
from kvpath.report.report import report_of
from tests.report.made import CONCAT, GQA, make_run
from tests.report.test_report import study, table

DECISION = {
    "format_version": 1,
    "layout": "gqa",
    "chosen": 0.006,
    "at_the_edge": True,
    "asked": {"set": ["model.optimizer.learning_rate"], "values": [0.003, 0.006, 0.1]},
    "candidates": [{"value": 0.003, "mean": 4.25}, {"value": 0.006, "mean": 4.125}, {"value": 0.1, "mean": None}],
}


def searched(folder: Path) -> Path:
    for rate in (0.003, 0.006):
        run = folder / f"search/gqa-learning_rate{rate}-seed9/train"
        make_run(run, GQA, 9, learning_rate=rate, steps=10, planned=10)
    (folder / "search" / "gqa.json").write_text(json.dumps(DECISION), encoding="utf-8")
    return folder


def test_they_are_in_no_table_of_results_and_name_no_arm(tmp_path: Path) -> None:
    alone = report_of([study(tmp_path / "alone")])
    report = report_of([searched(study(tmp_path / "study"))])
    assert report.runs == alone.runs == 6
    assert [row[1].text for row in table(report, "runs").rows] == ["GQA", "KVPath-Concat"]
    ((arm, setting, tried, chosen, edge),) = table(report, "searches").rows
    assert [cell.text for cell in (arm, setting, chosen, edge)] == ["gqa", "learning_rate", "0.006", "yes"]
    assert tried.text == "0.003 (4.2500), 0.006 (4.1250), 0.1 (diverged)"
    assert "searches" not in [found.name for found in alone.tables]


def test_candidates_are_left_out_before_anything_is_decided(tmp_path: Path) -> None:
    folder = searched(study(tmp_path / "study"))
    (folder / "search" / "gqa.json").unlink()
    report = report_of([folder])
    assert report.runs == 6
    assert "searches" not in [found.name for found in report.tables]


def test_a_search_that_is_asked_for_by_itself_is_shown(tmp_path: Path) -> None:
    folder = searched(study(tmp_path / "study")) / "search"
    assert report_of([folder]).runs == 2
    assert report_of([folder.parent, folder]).runs == 8


def test_a_run_that_lies_in_a_folder_of_that_name_above_is_not_one_of_a_search(tmp_path: Path) -> None:
    make_run(tmp_path / "search" / "mine", CONCAT)
    assert report_of([tmp_path / "search"]).runs == 1


@pytest.mark.parametrize("damage", ["{", "[]", '{"chosen": 1}'])
def test_a_damaged_decision_is_named(tmp_path: Path, damage: str) -> None:
    folder = searched(study(tmp_path / "study"))
    (folder / "search" / "gqa.json").write_text(damage, encoding="utf-8")
    with pytest.raises(UserError, match=r"gqa\.json"):
        report_of([folder])
