"""The run directory is opened once nothing can be refused any more."""

from lightning.pytorch import Callback, LightningModule, Trainer

from kvpath.training.run_directory import RunDirectory


class Opening(Callback):
    """Writes configuration, attempt and tokenizer when data and model are set up: a mistake leaves no run behind."""

    def __init__(self, run: RunDirectory, config: str) -> None:
        """Where, and the complete configuration as YAML."""
        self.run, self.config = run, config

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write them."""
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.run.begin(self.config)
            tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save(self.run.tokenizer)
