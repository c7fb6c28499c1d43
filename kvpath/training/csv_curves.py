"""Lightning's CSV logger deletes what an earlier attempt of a run has written: keep it."""

import csv
import io
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger

from kvpath.training.whole_files import write_whole


def keep_rows(loggers: Iterable[Logger]) -> None:
    """Let CSV loggers that have written nothing yet go on after the rows that their files hold."""
    for logger, path in _files(loggers):
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*log files in this directory will be deleted.*")
            writer = logger.experiment
        writer.metrics.extend(rows)  # type: ignore[arg-type] # text that is written as it is
        writer.save()


def drop_rows_after(loggers: Iterable[Logger], step: int) -> None:
    """Remove the rows of later steps than `step`."""
    for _, path in _files(loggers):
        kept = io.StringIO()
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            writer = csv.DictWriter(kept, rows.fieldnames or [])
            writer.writeheader()
            writer.writerows(row for row in rows if int(row["step"]) <= step)
        write_whole(path, kept.getvalue())


def _files(loggers: Iterable[Logger]) -> Iterator[tuple[CSVLogger, Path]]:
    for logger in loggers:
        if isinstance(logger, CSVLogger) and (path := Path(logger.log_dir) / "metrics.csv").exists():
            yield logger, path
