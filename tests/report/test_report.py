"""From folders to a report: what is compared, what is refused, what is left out."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvpath.errors import UserError
from kvpath.report.report import Report, report_of
from kvpath.report.tables import Table
from tests.report.made import CONCAT, GQA, backbone, make_run

CORPORA = ("c4", "pg19")


def values(base: float, contexts: tuple[int, ...] = (64,)) -> dict[tuple[str, int], float]:
    return {(corpus, context): base + index for index, corpus in enumerate(CORPORA) for context in contexts}


def study(folder: Path, seeds: int = 3, **changed: Any) -> Path:
    """GQA and Concat, whose perplexities are lower by 1, 2, 3, ...; `changed` is of Concat alone."""
    for seed in range(seeds):
        make_run(folder / f"gqa-seed{seed}", GQA, seed, values(30.0))
        make_run(folder / f"concat-seed{seed}", CONCAT, seed, **{"perplexities": values(29.0 - seed), **changed})
    return folder


def table(report: Report, name: str) -> Table:
    return next(table for table in report.tables if table.name == name)


def verdicts(report: Report) -> list[tuple[str, str]]:
    return [(row[3].text, row[4].text) for row in table(report, "matched").rows]


def test_means_deviations_and_the_paired_test(tmp_path: Path) -> None:
    report = report_of([study(tmp_path)])
    rows = {row[1].text: row for row in table(report, "perplexity-1").rows}
    c4, pg19, average, seeds = rows["KVPath-Concat"][2:]
    assert (c4.text, pg19.text, average.text, seeds.text) == ("28.00 ± 1.00", "29.00 ± 1.00", "28.50 ± 1.00", "0, 1, 2")
    assert rows["GQA"][2].text == "30.00 ± 0.00"
    difference = table(report, "differences-1-1").rows[0]
    assert [cell.text for cell in difference[:3]] == ["64", "KVPath-Concat", "C4"]
    assert (difference[3].value, difference[3].spread) == (pytest.approx(-2), pytest.approx(1))
    assert difference[4].value == pytest.approx(-100 * 2 / 30)
    t = 2 * math.sqrt(3)
    assert difference[6].value == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-6)
    assert difference[7].value == pytest.approx(5.653489 / math.sqrt(3), rel=1e-5)
    assert verdicts(report) == [("matched", "–")]
    bits = table(report, "bits-differences-1-1").rows[0]
    of_c4 = {row[1].text: row[2].value for row in table(report, "bits-per-byte-1").rows}
    assert of_c4["KVPath-Concat"] is not None
    assert of_c4["GQA"] is not None
    assert bits[3].value == pytest.approx(of_c4["KVPath-Concat"] - of_c4["GQA"])


def test_one_seed_can_say_nothing(tmp_path: Path) -> None:
    difference = table(report_of([study(tmp_path, seeds=1)]), "differences-1-1").rows[0]
    assert [cell.text for cell in difference[3:8]] == ["-1.000", "-3.33", "1", "one seed: nothing can be said", "–"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"stream_hash": "dead"}, "seed 0: other training tokens (dead and 0000000000000000)"),
        ({"model": backbone(CONCAT, d_ff=40)}, "parameters"),
        ({"model": backbone({**GQA, "init_args": {"n_heads": 2, "n_kv_heads": 2, "head_dim": 8}})}, "stored elements"),
        ({"steps": 80, "planned": 80}, "tokens 10,240 and 20,480"),
        ({"fingerprint": None}, "evaluated on different tokens, or in another dtype or stride"),
        ({"dtype": "32-true"}, "evaluated on different tokens, or in another dtype or stride"),
        ({"stride": 32}, "evaluated on different tokens, or in another dtype or stride"),
    ],
)
def test_what_is_not_matched_says_why(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    ((verdict, reason),) = verdicts(report_of([study(tmp_path, seeds=1, **changed)]))
    assert verdict == "NOT matched"
    assert said in reason


def test_no_seed_in_common_is_not_matched(tmp_path: Path) -> None:
    make_run(tmp_path / "a", GQA, 0, values(30.0))
    make_run(tmp_path / "b", CONCAT, 1, values(29.0))
    report = report_of([tmp_path])
    assert verdicts(report) == [("NOT matched", "no seed in common (1 and 0)")]
    assert not [table for table in report.tables if table.name.startswith("differences")]


def test_other_settings_are_said_and_no_budget(tmp_path: Path) -> None:
    report = report_of([study(tmp_path, seeds=1, learning_rate=2e-3)])
    assert verdicts(report) == [("matched", "–")]
    assert table(report, "matched").rows[0][5].text == "learning_rate"


def test_different_fingerprints_are_an_error_that_names_both(tmp_path: Path) -> None:
    study(tmp_path, seeds=1, fingerprint="bb")
    with pytest.raises(UserError) as caught:
        report_of([tmp_path])
    for part in ("concat-seed0", "gqa-seed0", "aac4", "bbc4", "--mixed"):
        assert part in str(caught.value)


def test_mixed_splits_tables(tmp_path: Path) -> None:
    report = report_of([study(tmp_path, seeds=2, fingerprint="bb")], mixed=True)
    arms = [[row[1].text for row in table(report, f"perplexity-{number}").rows] for number in (1, 2)]
    assert sorted(arms) == [["GQA"], ["KVPath-Concat"]]
    assert [table(report, f"perplexity-{number}").title[-10:] for number in (1, 2)] == ["(tokens A)", "(tokens B)"]
    assert not [table for table in report.tables if table.name.startswith("differences")]
    assert verdicts(report)[0][0] == "NOT matched"


def test_old_results_without_fingerprints_are_shown_and_not_compared(tmp_path: Path) -> None:
    report = report_of([study(tmp_path, seeds=2, fingerprint=None, by_position=False)])
    old = table(report, "perplexity-2")
    assert [row[1].text for row in old.rows] == ["KVPath-Concat"]
    assert "not comparable" in old.title
    assert "are not compared" in " ".join(old.notes)


def test_unfinished_runs_are_in_the_curves_alone(tmp_path: Path) -> None:
    study(tmp_path, seeds=1)
    make_run(tmp_path / "gqa-seed1", GQA, 1, values(10.0), steps=20, planned=40)
    make_run(tmp_path / "gqa-seed2", GQA, 2, values(10.0), planned=None)
    report = report_of([tmp_path])
    assert report.runs == 2
    assert list(report.left_out) == [
        f"{tmp_path}/gqa-seed1 is not finished, and in the curves alone: step 20, 40 are planned",
        f"{tmp_path}/gqa-seed2 is not finished, and in the curves alone: step 40, it has no summary.json",
    ]
    assert table(report, "runs").rows[0][2].text == "0"
    curves = {figure.name: figure.svg for section in report.sections for figure in section.figures}
    assert curves["training-64"].count("dashed") == 3  # two runs, and one entry of the legend


def test_nothing_but_unfinished_runs_is_still_a_report(tmp_path: Path) -> None:
    make_run(tmp_path / "a", planned=None)
    assert report_of([tmp_path]).runs == 0


def test_results_of_an_earlier_step_are_left_out(tmp_path: Path) -> None:
    study(tmp_path, seeds=1)
    file = tmp_path / "gqa-seed0" / "perplexity.json"
    entries = json.loads(file.read_text(encoding="utf-8"))
    entries[0]["step"] = 7
    file.write_text(json.dumps(entries), encoding="utf-8")
    report = report_of([tmp_path])
    assert "its result on c4 at 64 is left out: it is of step 7, and the run ended at 40" in report.left_out[0]
    gqa = table(report, "perplexity-1").rows[0]
    assert [cell.text for cell in gqa[1:5]] == ["GQA", "–", "31.00", "–"]


def test_overlapping_windows_have_a_table_of_their_own(tmp_path: Path) -> None:
    report = report_of([study(tmp_path, seeds=1, stride=32)])
    assert {table(report, f"perplexity-{number}").title for number in (1, 2)} == {
        "Perplexity, stage 64",
        "Perplexity, stage 64 (windows with stride 32)",
    }


def test_figures_that_there_is_something_for(tmp_path: Path) -> None:
    report = report_of([study(tmp_path, seeds=2, recall=True)])
    names = [figure.name for section in report.sections for figure in section.figures]
    assert names == [
        "cache-stored-1",
        "cache-read-1",
        "position-1-1",
        "position-against-1-1",
        "position-1-2",
        "position-against-1-2",
        "training-64",
        "validation-64",
        "recall-64-1",
    ]
    recall = table(report, "recall-1")
    assert recall.columns == ("Arm", "depth 0", "depth 0.25", "depth 0.5", "depth 0.75", "depth 1")
    assert [row[0].text for row in recall.rows] == ["KVPath-Concat"]


def test_without_gqa_nothing_is_compared(tmp_path: Path) -> None:
    make_run(tmp_path / "a", CONCAT, 0, values(29.0))
    report = report_of([tmp_path])
    assert not [table for table in report.tables if table.name in ("matched", "differences-1-1")]
    assert "there is no GQA among them" in report.sections[0].lines[1]


def test_another_reference(tmp_path: Path) -> None:
    report = report_of([study(tmp_path)], ["kvpath-concat"])
    assert table(report, "differences-1-1").rows[0][3].value == pytest.approx(2)
