from pathlib import Path

import pytest

from kvpath.analysis.latency import Timing, draw, fastest, report


def timing(arm: str, cell: str, seconds: float | None, aim: float | None = None, context: int = 8) -> Timing:
    return Timing(
        arm=arm, cell=cell, context=context, batch=2, seconds=seconds, bound_seconds=0.5, aim=aim, cache_bytes=1000,
        note="" if seconds else "over 5 s", costs={"aten::mm": 0.75, "aten::mul": 0.25},
    )  # fmt: skip


def test_what_a_timing_comes_to() -> None:
    one = timing("a", "x", 2.0, aim=1.5)
    assert (one.of_bound, one.tokens_per_s, one.missed) == (4.0, 1.0, True)
    assert not timing("a", "x", 0.7, aim=1.5).missed
    assert not timing("a", "x", 2.0).missed
    none = timing("a", "x", None, aim=1.5)
    assert (none.of_bound, none.tokens_per_s, none.missed) == (None, None, False)
    assert one.as_dict()["of_bound"] == 4.0


def test_the_fastest_of_each_cell() -> None:
    given = [timing("a", "x", 2.0), timing("b", "x", 1.0), timing("a", "y", 3.0), timing("b", "y", None)]
    assert {cell: one.arm for cell, one in fastest(given).items()} == {"x": "b", "y": "a"}


def test_the_report_says_what_is_missed_and_why() -> None:
    ours = [timing("ours", "x", 1.0, aim=1.5), timing("ours", "y", 2.0, aim=1.5), timing("ours", "z", None, aim=1.5)]
    peers = [timing("peer", "x", 0.25), timing("peer 2", "x", 0.125)]
    lines = report([*ours, *peers], peers).splitlines()
    assert [line.split() for line in lines if line.startswith("the best peer")] == [
        ["the", "best", "peer", "125.0"],
        ["the", "best", "peer", "0.25"],
    ]
    assert lines[-4:] == [
        "ours: z has no figure: over 5 s",
        "missed: ours, x: 2.00 x its bound, aim 1.5",
        "missed: ours, y: 4.00 x its bound, aim 1.5",
        "profile of ours, y: aten::mm 75.0%, aten::mul 25.0%",
    ]


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ours = [timing("ours", f"{n}", 1.0, context=n) for n in (8, 16)]
    peers = [timing("peer", "8", 0.5)]
    one_row = [Timing(**{**vars(one), "batch": 1}) for one in (*ours, *peers)]
    draw(one_row[:2], one_row[2:], tmp_path / "new")
    for name in ("latency.png", "memory.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")
