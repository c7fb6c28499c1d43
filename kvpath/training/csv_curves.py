"""Lightning's CSV logger deletes what an earlier attempt of a run has written: keep it."""

import csv
import warnings
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger


def keep_rows_until(logger: CSVLogger, step: int) -> None:
    """Let a logger that has written nothing yet go on after the rows of `step` that its file holds."""
    path = Path(logger.log_dir) / "metrics.csv"
    if not path.exists():
        return
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["step"]) <= step]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*log files in this directory will be deleted.*")
        writer = logger.experiment
    writer.metrics.extend(rows)  # type: ignore[arg-type] # text that is written as it is
    writer.save()
