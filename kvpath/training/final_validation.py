"""The state a run ends with is always validated."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class FinalValidation(Callback):
    """Runs the validation once more at the end of training, unless the last step had one."""

    def __init__(self) -> None:
        self._validated_step = -1

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remember the step."""
        if not trainer.sanity_checking:
            self._validated_step = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate inside of fit, so that the other callbacks and the loggers take part."""
        loop = trainer.fit_loop.epoch_loop.val_loop
        overfits = trainer.overfit_batches  # type: ignore[attr-defined]
        if self._validated_step == trainer.global_step or overfits or not trainer.enable_validation:
            return
        trainer.validating = True
        loop.run()
        trainer.training = True

    def state_dict(self) -> dict[str, Any]:
        """The last validated step."""
        return {"validated_step": self._validated_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._validated_step = state_dict["validated_step"]
