import json
import math
from pathlib import Path

from kvpath.training.metrics_file import MetricsFile, drop_lines_after, final_metrics, read_metrics


def test_lines_are_json_even_when_values_are_not_finite(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.log_metrics({"train/loss": 2.5, "epoch": 0}, step=1)
    file.log_metrics({"train/loss": math.nan, "train/perplexity": math.inf, "train/tokens": 4.0}, step=2)
    lines = [
        json.loads(line, parse_constant=lambda name: 1 / 0)
        for line in (tmp_path / "metrics.jsonl").open(encoding="utf-8")
    ]
    assert lines == [
        {"step": 1, "train/loss": 2.5},
        {
            "step": 2,
            "train/loss": None,
            "train/perplexity": None,
            "train/tokens": 4.0,
            "not_finite": ["train/loss", "train/perplexity"],
        },
    ]


def test_going_back_drops_later_lines_and_one_that_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "text": "é"}\n{"step": 2}\n{"step": 3}\n{"step": 2, "late": 1}\n{"step": 4, "tra')
    drop_lines_after(path, 2)
    assert read_metrics(path) == [{"step": 1, "text": "é"}, {"step": 2}, {"step": 2, "late": 1}]
    assert path.read_text(encoding="utf-8").count("\n") == 3
    drop_lines_after(tmp_path / "nothing.jsonl", 2)
    assert not (tmp_path / "nothing.jsonl").exists()


def test_final_metrics_are_the_last_of_each_name(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert final_metrics(path) == {}
    path.write_text('{"step": 1, "a": 1, "b": 5}\n{"step": 2, "a": 2, "c": null, "not_finite": ["c"]}\n')
    assert final_metrics(path) == {"a": 2, "b": 5}


def test_text_is_written_and_is_no_metric(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "metrics.jsonl").log_metrics({"a": 1.0, "hash": "00ff"}, step=3)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 3, "a": 1.0, "hash": "00ff"}]
    assert final_metrics(tmp_path / "metrics.jsonl") == {"a": 1.0}
