"""Validation by the clock begins where the first rank says so, whatever a rank's own clock shows."""

from datetime import timedelta
from pathlib import Path

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy

from kvpath.training.cadence import Cadence
from kvpath.training.validation_clock import ValidationClock
from tests.training.toys import toy_data, toy_module, toy_trainer


class Validated(Callback):
    """The steps of all validations."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note one."""
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize("minutes", [1e-9, 1e9])
def test_the_first_rank_decides(corpus: Path, monkeypatch: pytest.MonkeyPatch, minutes: float) -> None:
    answers = iter([False, True, False, False, True, False])

    def answered(self: SingleDeviceStrategy, value: object, src: int = 0) -> object:
        return next(answers) if isinstance(value, bool) else value

    monkeypatch.setattr(SingleDeviceStrategy, "broadcast", answered)
    validated, clock = Validated(), ValidationClock(Cadence(minutes, "minutes"))
    trainer = toy_trainer(validated, clock, val_check_interval=timedelta(minutes=1e-9), check_val_every_n_epoch=None)
    trainer.fit(toy_module(), toy_data(corpus, steps=6))
    assert validated.steps == [2, 5]
