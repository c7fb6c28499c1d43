"""Checkpoints: `last.ckpt`, always whole, and `best.ckpt`."""

import errno
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from kvpath.errors import UserError
from kvpath.training.cadence import Cadence, Clock


class Saving(Checkpoint):
    """Saves at a cadence and at the end; a checkpoint replaces the one before only once it is written in full.

    Where a validation is due at the same step, the checkpoint is written after it, so that a resumed run neither
    skips nor repeats it.
    """

    def __init__(self, directory: Path, every: str = "30 minutes", monitor: str = "validation/loss") -> None:
        """Where and how often.

        Args:
            directory: Where `last.ckpt` and `best.ckpt` go.
            every: As '500 steps', '100M tokens' or '30 minutes'.
            monitor: The metric whose smallest value is best.
        """
        self.directory = directory
        self.cadence = Cadence.parse(every, "every.save")
        self.monitor = monitor
        self.best: float | None = None
        self._due = False
        self._saved_step = -1

    @property
    def last(self) -> Path:
        """The checkpoint to resume from."""
        return self.directory / "last.ckpt"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        plan = getattr(getattr(trainer, "datamodule", None), "plan", None)
        self._clock = Clock(self.cadence, plan.tokens_per_step if plan is not None else 1)
        self._saved_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Save if it is due, unless a validation of this step comes first."""
        due = self._clock.due(trainer.global_step)
        self._due = trainer.strategy.broadcast(due) if self._clock.by_time else due

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """What was due after the last step is saved now, when its validation is over."""
        self._save_if_due(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the best."""
        value = trainer.callback_metrics.get(self.monitor)
        if trainer.sanity_checking or trainer.state.fn != "fit" or value is None:
            return
        if self.best is None or value.item() < self.best:
            self.best = value.item()
            self._save(trainer, self.directory / "best.ckpt")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The run's last state is always saved."""
        if trainer.global_step != self._saved_step:
            self._save(trainer, self.last)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """A run that ends by the user's mistake, such as data that is used up, keeps what it has learnt."""
        if isinstance(exception, UserError) and self._saved_step not in (-1, trainer.global_step):
            self._save(trainer, self.last)

    def state_dict(self) -> dict[str, Any]:
        """The best value so far."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.best = state_dict["best"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Between two steps the next batch counts as ready: a resume gets it anew, and must not count it twice."""
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            if counts["started"] == counts["completed"]:
                counts["ready"] = counts["completed"]

    def _save_if_due(self, trainer: Trainer) -> None:
        if self._due:
            self._due = False
            self._save(trainer, self.last)
            self._saved_step = trainer.global_step

    def _save(self, trainer: Trainer, path: Path) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            trainer.save_checkpoint(temporary, weights_only=False)
            # Lightning moves the file here from TMPDIR: on another disk, a kill would leave half of it.
            if trainer.is_global_zero:
                temporary.replace(path)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise UserError(
                f"no space left for a checkpoint in {self.directory}; the one before it is still whole"
            ) from error
