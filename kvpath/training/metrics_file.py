"""Scalars as one JSON object a line, in `metrics.jsonl`."""

import json
import math
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from kvpath.training.whole_files import write_whole


class MetricsFile(Logger):
    """Appends {"step": ..., name: value, ...}."""

    def __init__(self, path: Path) -> None:
        """Lines go to `path`, each flushed as it is written."""
        super().__init__()
        self.path = path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.parent.name

    @property
    def version(self) -> str:
        """There is one file a run."""
        return ""

    @property
    @rank_zero_experiment
    def experiment(self) -> "MetricsFile":
        """Itself."""
        return self

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float | str], step: int | None = None) -> None:  # type: ignore[override]
        """Append one line; a value that is not finite becomes null, as JSON has it, and is named in `not_finite`."""
        texts = {name: value for name, value in metrics.items() if isinstance(value, str)}
        values = {name: float(value) for name, value in metrics.items() if name != "epoch" and name not in texts}
        broken = sorted(name for name, value in values.items() if not math.isfinite(value))
        line: dict[str, Any] = {"step": step, **values, **texts, **dict.fromkeys(broken)}
        if broken:
            line["not_finite"] = broken
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """They stand in config.yaml."""


def drop_lines_after(path: Path, step: int) -> None:
    """Remove the lines of later steps than `step`, and a last line that a kill cut short."""
    if path.exists():
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        write_whole(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))


def final_metrics(path: Path) -> dict[str, float]:
    """The last value of every scalar in a metrics file; of those that are not finite, none."""
    last: dict[str, Any] = {}
    for line in read_metrics(path) if path.exists() else []:
        last.update(line)
    return {name: value for name, value in last.items() if name != "step" and isinstance(value, int | float)}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file with one JSON object a line."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines
