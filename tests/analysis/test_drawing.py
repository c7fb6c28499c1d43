import sys
from pathlib import Path

import pytest

from kvpath.analysis.drawing import draw
from kvpath.errors import UserError
from tests.cases import Case, every_case


@every_case
def test_every_layout_is_drawn(case: Case, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(case.config().layout(), tmp_path / "layout.png", case.name)
    assert (tmp_path / "layout.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    layout = Case.__new__(Case)
    with pytest.raises(UserError, match=r"drawing needs matplotlib: pip install 'kvpath\[demo\]'"):
        draw(layout, tmp_path / "layout.png", "none")  # type: ignore[arg-type]
