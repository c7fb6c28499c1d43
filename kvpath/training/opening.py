"""The run directory is opened once nothing can be refused any more."""

from contextlib import suppress
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from kvpath.training.csv_curves import drop_rows_after
from kvpath.training.curves import drop_events_after, event_files
from kvpath.training.metrics_file import drop_lines_after
from kvpath.training.run_directory import RunDirectory
from kvpath.training.stored_config import stored_step


class Opening(Callback):
    """Writes configuration, attempt and tokenizer when data and model are set up: a mistake leaves no run behind.

    What an earlier attempt logged after the step that this one begins at is dropped then, and not before.
    """

    def __init__(self, run: RunDirectory, config: str, resumes: str | None = None) -> None:
        """Where, the complete configuration as YAML, and the checkpoint that this attempt goes on from.

        The Trainer would say the last too late: with DeepSpeed after `on_fit_start`.
        """
        self.run, self.config, self.resumes = run, config, resumes
        self._events = event_files(run.curves)  # before this attempt's logger begins one
        self._opened = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write them."""
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._go_back(trainer, stored_step(Path(self.resumes)) if self.resumes else 0)
            self._opened = True
            self.run.begin(self.config)
            tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save(self.run.tokenizer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take away the curves that were begun for nothing: Lightning begins them before all else."""
        if trainer.is_global_zero and not self._opened:
            for path in set(event_files(self.run.curves)) - set(self._events):
                path.unlink()
            for folder in (self.run.curves, self.run.path):
                with suppress(OSError):  # there is more in it, or it was never made
                    folder.rmdir()

    def _go_back(self, trainer: Trainer, step: int) -> None:
        drop_lines_after(self.run.metrics, step)
        drop_lines_after(self.run.samples, step)
        drop_events_after(self._events, step)
        drop_rows_after(trainer.loggers, step)
