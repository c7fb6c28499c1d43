"""Results of an evaluation: a table for people, and for programs a file of predictions."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from kvpath.evaluation.retrieval import task_name


def results_table(results: list[dict[str, Any]]) -> str:
    """One row for each corpus and context; a column of strides if any windows overlap."""
    width = max([16, *(len(row.get("corpus", "-")) + 1 for row in results)])
    sliding = any(row.get("stride") != row.get("context") for row in results)

    def line(corpus: str, context: str, stride: str, *rest: str) -> str:
        cells = [context, *([stride] if sliding else []), *rest]
        return f"{corpus:<{width}}" + "".join(f"{cell:>{size}}" for cell, size in zip(cells, sizes, strict=True))

    sizes = [9, *([9] if sliding else []), 12, 12, 9, 12, 11]
    lines = [line("corpus", "context", "stride", "tokens", "bytes", "loss", "perplexity", "bits/byte")]
    for row in results:
        bits = row.get("bits_per_byte")
        counts = [f"{row.get(name) or 0:,}" for name in ("context", "stride", "tokens", "bytes")]
        measured = [f"{row['loss']:.4f}", f"{row['perplexity']:.3f}", "-" if bits is None else f"{bits:.4f}"]
        lines.append(line(row.get("corpus", "-"), *counts, *measured))
    return "\n".join(lines)


def recall_table(results: list[dict[str, Any]]) -> str:
    """One row for each task, context, and number of keys or depth."""
    names = [task_name(row) for row in results]
    width = max([16, *(len(name) + 1 for name in names)])
    lines = [f"{'task':<{width}}{'context':>9}{'asked':>10}{'correct':>10}{'accuracy':>10}"]
    for name, row in zip(names, results, strict=True):
        counts = f"{row['context']:>9,}{row['asked']:>10,}{row['correct']:>10,}"
        lines.append(f"{name:<{width}}{counts}{row['accuracy']:>10.3f}")
    return "\n".join(lines)


class PredictionFile(BasePredictionWriter):
    """One JSON object a window: its tokens, labels and the negative log-likelihood of each label in nats."""

    def __init__(self, path: Path) -> None:
        super().__init__(write_interval="batch")
        self.path = path

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a new file; ranks beyond the first write files of their own."""
        if trainer.global_rank:
            self.path = self.path.with_suffix(f".rank{trainer.global_rank}{self.path.suffix}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("", encoding="utf-8")

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Append the windows of a batch."""
        with self.path.open("a", encoding="utf-8") as file:
            for tokens, labels, nll in zip(*(prediction[key] for key in ("tokens", "labels", "nll")), strict=True):
                row = {"tokens": tokens.tolist(), "labels": labels.tolist(), "nll": nll.tolist()}
                file.write(json.dumps(row) + "\n")
