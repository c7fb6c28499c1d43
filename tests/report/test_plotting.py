"""The chart: well-formed, with few round ticks, and no markup out of labels."""

import xml.etree.ElementTree as ElementTree

import pytest

from kvpath.report.plotting import Axis, Line, chart, log_ticks, nice_ticks

SVG = "{http://www.w3.org/2000/svg}"


def test_chart_is_xml_with_a_line_and_markers() -> None:
    line = Line(((1.0, 2.0), (3.0, 4.0)), "<b>arm", 0, (0.5, None), marked=True)
    root = ElementTree.fromstring(chart("a & b", Axis("x"), Axis("y"), [line]))
    assert root.get("aria-label") == "a & b"
    assert len(root.findall(f".//{SVG}polyline")) == 1
    assert "<b>arm" in [text.text for text in root.iter(f"{SVG}text")]
    assert len(root.findall(f".//{SVG}circle")) == 3  # two points and the legend's


def test_a_label_stands_once_in_the_legend() -> None:
    lines = [Line(((float(seed), 1.0), (2.0, 2.0)), "arm", 0, thin=True) for seed in range(3)]
    assert chart("t", Axis("x"), Axis("y"), lines).count(">arm</text>") == 1


def test_one_point_and_equal_values_have_axes() -> None:
    ElementTree.fromstring(chart("t", Axis("x", log=True), Axis("y"), [Line(((5.0, 5.0),), "a", 0, marked=True)]))


def test_no_points_are_refused() -> None:
    with pytest.raises(ValueError, match="no points"):
        chart("t", Axis("x"), Axis("y"), [Line((), "a", 0)])


def test_ticks_are_few_and_round() -> None:
    assert nice_ticks(0.0, 1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert nice_ticks(26.8, 28.9) == pytest.approx([27, 27.5, 28, 28.5])
    assert log_ticks(1.0, 32768.0, twos=True) == [1, 4, 16, 64, 256, 1024, 4096, 16384]
    assert log_ticks(15.0, 250.0) == [20, 50, 100, 200]
    for low, high in ((0.001, 0.0013), (3.0, 1e9), (1e-9, 2e-9)):
        assert 2 <= len(nice_ticks(low, high)) <= 7
        assert 2 <= len(log_ticks(low, high)) <= 10
