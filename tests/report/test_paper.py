"""The paper's figures, printed and recomputed, and which runs fill its cells."""

from pathlib import Path
from typing import Any

import pytest

from kvpath.config import load_config
from kvpath.report.arms import arms_of
from kvpath.report.paper import ABLATION_REFERENCE, fits, paper_tables, recomputed_gain
from kvpath.report.printed import ABLATIONS, BILLION, CONTEXTS, CORPORA, MAIN, MLA, Budget, Printed
from kvpath.report.runs import read_runs
from kvpath.report.sheets import sheets_of
from kvpath.report.tables import EMPTY, Table
from kvpath.training.stored_config import to_plain
from tests.report.made import make_run

LAST_STAGE: dict[str, Any] = {
    "seq_len": 32768,
    "per_step": 8_388_608,
    "steps": 119,
    "planned": 119,
    "start_tokens": 11_000_000_000,
    "logged": 5,
}
PIECES = {
    "GQA": "gqa",
    "CLA": "cla",
    "KVPath-Concat": "kvpath_concat",
    "KVPath-Residual": "kvpath_residual",
    "MLA": "mla",
    "KVPath-MLA": "kvpath_mla",
}


def model(*pieces: str) -> dict[str, Any]:
    return dict(to_plain(load_config("model/98m", *(piece for piece in pieces)).backbone))


@pytest.mark.parametrize("printed", [MAIN, MLA])
def test_printed_averages_and_gains_follow_from_the_rows(printed: Printed) -> None:
    for values in printed.rows.values():
        assert sum(values[:-1]) / 4 == pytest.approx(values[-1], abs=0.0101)
    for name, stated in printed.gains.items():
        for context, gain in zip(CONTEXTS, stated, strict=True):
            assert recomputed_gain(printed, name, context) == pytest.approx(gain, abs=0.02)


def test_the_ablations_reference_is_not_in_the_main_table() -> None:
    printed = {value for (_, name), row in MAIN.rows.items() if name == "KVPath-Concat" for value in row}
    assert not {round(value, 2) for value in ABLATION_REFERENCE} & printed


BUDGETS = {**MAIN.models, **MLA.models}
ABLATION_PIECES = {"g=2": "g2", "g=8": "g8", "No grouping (g=12)": "g12", "d_s=16": "ds16", "d_s=64": "ds64"}


@pytest.mark.parametrize(
    ("budget", "pieces"),
    [(BUDGETS[name], [f"attention/{piece}"]) for name, piece in PIECES.items()]
    + [(ABLATIONS[name], ["attention/kvpath_concat", f"ablation/{piece}"]) for name, piece in ABLATION_PIECES.items()],
)
def test_each_piece_fills_its_own_row_alone(tmp_path: Path, budget: Budget, pieces: list[str]) -> None:
    make_run(tmp_path / "whatever", model=model(*pieces), **LAST_STAGE)
    (run,), _ = read_runs([tmp_path])
    assert fits(run, budget)
    others = [other for other in (*BUDGETS.values(), *ABLATIONS.values()) if other != budget]
    assert not any(fits(run, other) for other in others)


@pytest.mark.parametrize("changed", [{"seq_len": 8192, "per_step": 2_097_152}, {"steps": 100}, {"start_tokens": None}])
def test_another_budget_fills_nothing(tmp_path: Path, changed: dict[str, Any]) -> None:
    make_run(tmp_path / "gqa", model=model("attention/gqa"), **{**LAST_STAGE, **changed})
    (run,), _ = read_runs([tmp_path])
    assert not fits(run, MAIN.models["GQA"])


def test_a_billion_is_decided_by_parameters_and_tokens(tmp_path: Path) -> None:
    big = to_plain(load_config("model/1b", "attention/1b/gqa").backbone)
    make_run(tmp_path / "big", model=big, seq_len=2048, per_step=10_000_000, steps=10_000, planned=10_000, logged=8)
    (run,), _ = read_runs([tmp_path])
    assert fits(run, BILLION["GQA"])
    assert not fits(run, BILLION["KVPath-I"])
    arms, _ = arms_of([run])
    (planned,) = (table for table in paper_tables(arms, []) if table.name == "paper-1b")
    ours = planned.rows[1]
    assert (ours[2].value, ours[3].value, ours[4].value) == (run.costs.parameters, 1e11, 16_384)
    assert ours[5].value == run.validation_perplexity


def tables(folder: Path) -> dict[str, Table]:
    runs, _ = read_runs([folder])
    arms, _ = arms_of(runs)
    sheets, _ = sheets_of(arms, mixed=False)
    return {table.name: table for table in paper_tables(arms, sheets)}


def test_ours_stand_below_printed_and_gains_are_ours(tmp_path: Path) -> None:
    labels = ("allenai/c4/en", "HuggingFaceFW/fineweb-edu/sample-10BT", "wikimedia/wikipedia/20231101.en", "pg19")
    for piece, base in (("gqa", 40.0), ("kvpath_concat", 38.0)):
        for seed in (0, 1):
            values = {(label, 32768): base + index for index, label in enumerate(labels)}
            make_run(
                tmp_path / f"{piece}{seed}",
                seed=seed,
                perplexities=values,
                model=model(f"attention/{piece}"),
                **LAST_STAGE,
            )
    found = tables(tmp_path)
    main = {(*(cell.text for cell in row[:3]),): row[3:] for row in found["paper-main"].rows}
    assert [cell.value for cell in main["32K", "GQA", "printed"]] == list(MAIN.rows[32768, "GQA"])
    assert all(cell.printed for cell in main["32K", "GQA", "printed"])
    assert [cell.value for cell in main["32K", "GQA", "ours"]] == pytest.approx([40, 41, 42, 43, 41.5])
    assert main["32K", "GQA", "ours"][0].spread == pytest.approx(0)
    assert not any(cell.printed for cell in main["32K", "GQA", "ours"])
    assert set(main["2K", "GQA", "ours"]) == set(main["32K", "CLA", "ours"]) == {EMPTY}
    gains = {(row[0].text, row[1].text): row[2:] for row in found["paper-main-gains"].rows}
    assert gains["KVPath-Concat", "ours"][2].value == pytest.approx(100 * 2 / 41.5)
    assert gains["KVPath-Concat", "ours"][:2] == (EMPTY, EMPTY)
    ablation = {(row[0].text, row[1].text): row[2:] for row in found["paper-ablation"].rows}
    assert [cell.value for cell in ablation["Reference (g=4, d_s=32)", "ours"][:2]] == [98_710_016, 6_144]
    assert ablation["Reference (g=4, d_s=32)", "ours"][4].value == pytest.approx(39)
    assert "not called reproduced" in " ".join(found["paper-ablation"].notes)


def test_without_runs_all_of_ours_are_empty() -> None:
    for table in paper_tables([], []):
        ours = [cell for row in table.rows if "ours" in (row[1].text, row[2].text) for cell in row[2:]]
        assert {cell.text for cell in ours} <= {"ours", EMPTY.text}
    assert len(CORPORA) == 4
