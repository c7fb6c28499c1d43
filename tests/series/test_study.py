"""The file of a series: what it makes, and what is said of mistakes."""

from pathlib import Path
from typing import Any

import pytest

from kvpath.errors import UserError
from kvpath.series.jobs import jobs_of
from kvpath.series.study import Study, cell_name
from tests.series.studies import AXES, job_of, progress_of, write_study

PLAIN: dict[str, Any] = {"run": "r", "stages": [{"name": "a", "pieces": []}]}
SEARCH: dict[str, Any] = {"set": "model.seed", "values": [1]}


def cells(folder: Path, **changes: Any) -> list[str]:
    return [cell_name(cell) for cell in Study.read(write_study(folder, **changes)).combinations()]


def test_a_cell_for_each_combination(tmp_path: Path) -> None:
    assert cells(tmp_path) == ["gqa-seed1", "gqa-seed2", "wide-seed1", "wide-seed2"]
    assert cells(tmp_path, axes=None) == [""]


def test_combinations_are_left_out(tmp_path: Path) -> None:
    assert cells(tmp_path, **{"except": [{"layout": "wide", "seed": 2}]}) == ["gqa-seed1", "gqa-seed2", "wide-seed1"]
    assert cells(tmp_path, only=[{"layout": "wide"}, {"seed": [1]}]) == ["gqa-seed1", "wide-seed1", "wide-seed2"]
    with pytest.raises(UserError, match="only and except leave no combination"):
        cells(tmp_path, **{"except": [{"layout": ["gqa", "wide"]}]})


def test_later_settings_go_over_earlier_ones(tmp_path: Path) -> None:
    axes = {"layout": {"a": {"set": {"model.z_loss": 1, "model.seed": 5}}}, "seed": AXES["seed"]}
    stages = [{"name": "short", "pieces": [], "set": {"data.seed": 7}}]
    progress = progress_of(tmp_path, set={"model.z_loss": 2, "every.save": "1 step"}, axes=axes, stages=stages)
    flags = ("--model.z_loss=1", "--every.save=1 step", "--model.seed=1", "--data.seed=7")
    assert job_of(progress, "a-seed1", "short").flags == flags


def test_settings_are_what_the_command_line_reads(tmp_path: Path) -> None:
    given = {"data.eval_contexts": [16, 32], "model.compile": False, "data.max_tokens": None, "every.log": "2 steps"}
    job = job_of(progress_of(tmp_path, set=given, axes=None), "", "short")
    flags = ("--data.eval_contexts=[16, 32]", "--model.compile=false", "--data.max_tokens=null", "--every.log=2 steps")
    assert job.flags == flags


def test_a_search_on_a_later_stage_shares_the_runs_before_it(tmp_path: Path) -> None:
    search = {
        **SEARCH,
        "set": "model.z_loss",
        "values": [1, 2],
        "stage": "long",
        "seeds": {"set": "model.seed", "values": [7]},
    }
    study = Study.read(write_study(tmp_path, search=search))
    names = [str(job.directory.relative_to(study.run)) for job in jobs_of(study) if job.cell.startswith("search/gqa")]
    assert names == ["search/gqa-seed7/short", "search/gqa-z_loss1-seed7/long", "search/gqa-z_loss2-seed7/long"]
    after = {job.after for job in jobs_of(study) if job.candidate and job.candidate[0] == "gqa"}
    assert after == {study.run / "search/gqa-seed7/short"}


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"axes": [1]}, ["axes must hold values by the name of an axis, got [1]"]),
        ({"axes": {"a": {}}}, ["axes.a must hold named values, or set and values, got {}"]),
        ({"axes": {"a/b": {"x": None}}}, ["axes.a/b must be a name of letters"]),
        ({"axes": {"a": {"../x": None}}}, ["axes.a: '../x' must be a name of letters"]),
        ({"axes": {"a": {"x": 3}}}, ["axes.a.x must hold pieces or set, got 3"]),
        (
            {"axes": {"a": {"x": {"piece": [], "set": [1], "pieces": "p"}}}},
            ["axes.a.x.piece is not a key", "axes.a.x.pieces must be a list", "axes.a.x.set must hold values"],
        ),
        ({"axes": {"a": {"values": [1]}}}, ["axes.a.set must be a dotted key or a list of them, got None"]),
        (
            {"axes": {"a": {"set": "k", "values": [1, 1, "x/y"], "more": 1}}},
            ["axes.a.more is not a key", "got 'x/y'", "axes.a.values must be different, got [1, 1, 'x/y']"],
        ),
        ({"only": {"layout": "gqa"}}, ["only must be a list of combinations"]),
        (
            {"except": [{"layuot": "gqa"}, {"seed": [1, 9]}]},
            [
                "except[0]: layuot is not an axis; there are layout, seed",
                "except[1].seed: 9 is not a value of it; there are 1, 2",
            ],
        ),
        ({"axes": {"a": {"x-y": None, "x": None}, "b": {"z": None, "y-z": None}}}, ["directory 'x-y-z'"]),
        ({"axes": {"a": {"search": None}}, "search": SEARCH}, ["may not be called search"]),
        ({"search": [1]}, ["search must hold set, values, stage and axis, got [1]"]),
        (
            {"search": {**SEARCH, "stage": "9k", "axis": "x"}},
            ["search.stage must be one of a, got '9k'", "search.axis must be"],
        ),
        ({"search": SEARCH, "axes": None}, ["search needs axes"]),
        (
            {"search": {**SEARCH, "seeds": {"set": ["data.seed"], "values": [2, 3]}}},
            ["search.seeds must be others than those of axes.seed, got 2 in both"],
        ),
        ({"test": 3}, ["test must hold pieces or set, got 3"]),
        (
            {"test": {"after": "all", "set": 1}},
            ["test.set must hold", "test.after must be last or each (of the stages), got 'all'"],
        ),
        (
            {"stages": [{"name": "a/b", "pieces": [], "set": 1}]},
            ["stages[0].name must be of", "stages[0].set must hold"],
        ),
    ],
)
def test_mistakes_come_together_in_one_line(tmp_path: Path, changes: dict[str, Any], messages: list[str]) -> None:
    with pytest.raises(UserError) as raised:
        Study.read(write_study(tmp_path, **{**PLAIN, "axes": AXES, **changes}))
    said = str(raised.value)
    assert said.startswith(f"series {tmp_path / 'study.yaml'}: ")
    assert "\n" not in said
    assert [message for message in messages if message not in said] == []
