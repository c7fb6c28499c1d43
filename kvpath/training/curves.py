"""TensorBoard's event files, where its own writer falls short: going back to a step, and the table of runs."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from kvpath.training.watch import BY_TOKENS


class Curves(TensorBoardLogger):
    """TensorBoard in the folder `tb` of a run, without the epochs that Lightning adds: a run is one."""

    def __init__(self, run: Path) -> None:
        """Events go to `run`/tb."""
        super().__init__(run, name="", version="tb", default_hp_metric=False)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a point to each curve."""
        super().log_metrics({name: value for name, value in metrics.items() if name != "epoch"}, step)


def event_files(folder: Path) -> list[Path]:
    """The event files of a folder, oldest first."""
    return sorted(folder.glob("events.out.tfevents.*"))


def drop_events_after(files: Sequence[Path], step: int) -> None:
    """Rewrite event files of one folder as one, without what was logged after `step`.

    TensorBoard's own way, to purge from a step on, would take tokens for steps and drop the whole curve over tokens.
    """
    from tensorboard.summary.writer.record_writer import RecordWriter

    if not files:
        return
    temporary, kept = files[0].with_name("events.tmp"), True
    with temporary.open("wb") as file:
        writer = RecordWriter(file)
        for event in _events(files):
            if not any(value.tag == BY_TOKENS for value in event.summary.value):
                kept = event.step <= step
            # The point over tokens follows those of its step.
            if kept:
                writer.write(event.SerializeToString())
    temporary.replace(files[0])
    for path in files[1:]:
        path.unlink()


def write_hyper_parameters(logger: TensorBoardLogger, values: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """A row of TensorBoard's table of runs, whose columns are the last points of the curves named in `metrics`.

    The logger's own method would also put the metrics on the curves once more, at step 0.
    """
    from torch.utils.tensorboard.summary import hparams

    plain = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in values.items()}
    writer = logger.experiment._get_file_writer()
    for summary in hparams(plain, dict(metrics)):
        writer.add_summary(summary)
    writer.flush()


def _events(files: Sequence[Path]) -> Iterator[Any]:
    """All events; a last one that a kill cut short is left out."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for path in files:
        yield from LegacyEventFileLoader(str(path)).Load()
