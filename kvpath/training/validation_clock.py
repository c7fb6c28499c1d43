"""Validation by the clock, on several ranks."""

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from kvpath.training.cadence import Cadence, Clock


class ValidationClock(Callback):
    """Lets the first rank's clock decide for all: a rank that began to validate alone would wait for the others.

    Lightning asks each rank's own clock, and for that reads the time of the last validation that is set here.
    """

    def __init__(self, cadence: Cadence) -> None:
        """How often; nothing is done for one in steps or tokens."""
        self.cadence = cadence
        self._clock = Clock(cadence, 1)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._clock = Clock(self.cadence, 1)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Make it long ago if a validation is due, else in the future."""
        if self._clock.by_time:
            due = trainer.strategy.broadcast(self._clock.due(trainer.global_step))
            trainer._last_val_time = -math.inf if due else math.inf  # type: ignore[attr-defined]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The time that it took does not count."""
        self._clock = Clock(self.cadence, 1)
