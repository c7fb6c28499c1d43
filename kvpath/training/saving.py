"""Checkpoints: `last.ckpt`, always whole, `previous.ckpt`, the one before it, and `best.ckpt`."""

from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from kvpath.errors import DISK_FAULTS, UserError
from kvpath.training.cadence import Cadence, Clock
from kvpath.training.deepspeed.directory import is_sharded
from kvpath.training.stored_config import read_checkpoint
from kvpath.training.whole_files import (
    TEMPORARY,
    keep_as,
    put_in_place,
    remove,
    remove_leftovers,
    save_to_disk,
    stand_in,
)


class Saving(Checkpoint):
    """Saves at a cadence and at the end; a checkpoint replaces the one before only once it is written in full.

    Where a validation is due at the same step, the checkpoint is written after it, so that a resumed run neither
    skips nor repeats it.
    """

    def __init__(self, directory: Path, every: str = "30 minutes", monitor: str = "validation/loss") -> None:
        """Where and how often.

        Args:
            directory: Where `last.ckpt`, `previous.ckpt` and `best.ckpt` go.
            every: As '500 steps', '100M tokens' or '30 minutes'.
            monitor: The metric whose smallest value is best.
        """
        self.directory = directory
        self.cadence = Cadence.parse(every, "every.save")
        self.monitor = monitor
        self.best: float | None = None
        self.due = False
        """Whether to save as soon as the validation of this step is over, if there is one."""
        self._saved_step = -1

    @property
    def last(self) -> Path:
        """The checkpoint to resume from."""
        return self.directory / "last.ckpt"

    @property
    def previous(self) -> Path:
        """The one before it."""
        return self.directory / "previous.ckpt"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write without detours and read any, unless the Trainer was given a way of its own to checkpoints."""
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = _OnDisk()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        if trainer.is_global_zero:
            remove_leftovers(self.directory)
            self._begin_from(trainer.ckpt_path)
        plan = getattr(getattr(trainer, "datamodule", None), "plan", None)
        self._clock = Clock(self.cadence, plan.tokens_per_step if plan is not None else 1)
        self._saved_step = trainer.global_step

    def _begin_from(self, checkpoint: str | Path | None) -> None:
        """What a run goes on from is its last: a later one is damaged, or of a future that was left."""
        begun = Path(checkpoint).resolve() if checkpoint else None
        if begun is not None and begun.parent == self.directory.resolve() and begun.name != self.last.name:
            stand_in(begun, self.last)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Save if it is due, unless a validation of this step comes first."""
        due = self._clock.due(trainer.global_step)
        self.due |= trainer.strategy.broadcast(due) if self._clock.by_time else due

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """What was due after the last step is saved now, when its validation is over."""
        self.save_if_due(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the best."""
        value = trainer.callback_metrics.get(self.monitor)
        if trainer.sanity_checking or trainer.state.fn != "fit" or value is None or not value.isfinite():
            return
        if self.best is None or value.item() < self.best:
            self.best = value.item()
            self._save(trainer, self.directory / "best.ckpt")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The run's last state is always saved."""
        self.save_last(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """A run that ends between two steps by the user's mistake, such as data that is used up, keeps what it has."""
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if isinstance(exception, UserError) and self._saved_step != -1 and batches.started == batches.completed:
            self.save_last(trainer)

    def save_if_due(self, trainer: Trainer) -> None:
        """Save what was due after the last step, between two steps."""
        if self.due:
            self.save_last(trainer)

    def save_last(self, trainer: Trainer) -> None:
        """Write `last.ckpt`, unless it holds this step already; every rank must call it, between two steps."""
        self.due = False
        if trainer.global_step != self._saved_step:
            self._save(trainer, self.last)
            self._saved_step = trainer.global_step

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

    def _save(self, trainer: Trainer, path: Path) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        temporary = path.with_suffix(TEMPORARY)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            trainer.save_checkpoint(temporary, weights_only=False)
            if trainer.is_global_zero:
                if path == self.last and path.exists():
                    keep_as(path, self.previous)
                put_in_place(temporary, path)
        except OSError as error:
            if error.errno not in DISK_FAULTS:
                raise
            self._saved_step = -1  # nor can it be saved at the end
            remove(temporary)
            raise UserError(
                f"{DISK_FAULTS[error.errno]} for a checkpoint in {self.directory}; the one before it is still whole"
            ) from error


def saving_of(trainer: Trainer, needed_by: str) -> Saving:
    """The callback of a Trainer that saves.

    Raises:
        UserError: it has none.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Saving):
            return callback
    raise UserError(f"{needed_by} needs Saving among the callbacks of the Trainer")


class _OnDisk(TorchCheckpointIO):
    """Writes where it is told to and down to the disk: Lightning copies to memory, to TMPDIR, and moves that."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a file.

        Raises:
            OSError: it cannot be written.
        """
        save_to_disk(checkpoint, path)

    def load_checkpoint(self, path: str | Path, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Read a file, or what the ranks of ZeRO wrote together as a directory.

        Raises:
            Damaged: the directory is incomplete.
        """
        if is_sharded(Path(path)):
            return read_checkpoint(Path(path))
        return super().load_checkpoint(path, *arguments, **options)
