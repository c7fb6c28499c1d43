"""A module that only keeps its batches, and a Trainer for it."""

from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor

from kvpath.data.datamodule import PackedText
from kvpath.data.loaders import Batch
from kvpath.data.packing import IGNORE

SEQ_LEN = 8
Make = Callable[..., PackedText]


class Recorder(pl.LightningModule):
    """Trains one number and keeps the batches that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.automatic_optimization = False
        self.trained: list[Tensor] = []
        self.evaluated: list[tuple[int, Batch]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """Keep the tokens, and take a step on their sum."""
        self.trained.append(batch["tokens"])
        optimizer = self.optimizers()
        for micro_batch in batch["tokens"]:
            self.manual_backward(self.weight * micro_batch.sum())
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad()  # type: ignore[union-attr]

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Keep the batch, with the number of its loader."""
        self.evaluated.append((dataloader_idx, batch))

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Of the one number."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(folder: Path, **changes: object) -> pl.Trainer:
    """Silent, on a CPU, of eight steps."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    arguments = {**quiet, "default_root_dir": folder, "max_steps": 8, "enable_checkpointing": False, **changes}
    return pl.Trainer(**arguments)  # type: ignore[arg-type]


def scored(model: Recorder) -> int:
    """Labels that were evaluated, those that are ignored apart."""
    return sum(int((batch["labels"] != IGNORE).sum()) for _, batch in model.evaluated)
