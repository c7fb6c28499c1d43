import sys
from pathlib import Path

import pytest

from kvpath.analysis.drawing import draw
from kvpath.attention import Heads, LayerLayout, Layout, Slot
from kvpath.errors import UserError
from tests.cases import CASES, Case

# Together: paths, states that are not stored, ranges of columns, several owners of one reader, windows.
DRAWN = ["concat-some", "residual-some", "rolling-some", "local-history-shared"]


@pytest.mark.parametrize("case", [case for case in CASES if case.name in DRAWN], ids=str)
def test_layouts_are_drawn(case: Case, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(case.config().layout(), tmp_path / "layout.png", case.name)
    assert (tmp_path / "layout.png").read_bytes().startswith(b"\x89PNG")


def one_layer() -> Layout:
    return Layout((LayerLayout({"k": Slot(1, 4)}, (), Heads(1, 4, 4)),))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match="cannot write .*absent"):
        draw(one_layer(), tmp_path / "absent" / "layout.png", "toy")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"drawing needs matplotlib: pip install 'kvpath\[demo\]'"):
        draw(one_layer(), tmp_path / "layout.png", "toy")
