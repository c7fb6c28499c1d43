"""Results of an evaluation: a table for people, a file for programs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from kvpath.training.module import LanguageModel
from kvpath.training.run_directory import commit
from kvpath.training.stored_config import FORMAT_VERSION
from kvpath.version import __version__


def results_table(results: list[dict[str, Any]]) -> str:
    """One row for each corpus and context."""
    width = max([16, *(len(row.get("corpus", "-")) + 1 for row in results)])
    lines = [
        f"{'corpus':<{width}}{'context':>9}{'tokens':>12}{'bytes':>12}{'loss':>9}{'perplexity':>12}{'bits/byte':>11}"
    ]
    for row in results:
        bits = row.get("bits_per_byte")
        lines.append(
            f"{row.get('corpus', '-'):<{width}}{row.get('context', 0):>9,}{row['tokens']:>12,}{row['bytes'] or 0:>12,}"
            f"{row['loss']:>9.4f}{row['perplexity']:>12.3f}" + (f"{bits:>11.4f}" if bits is not None else f"{'-':>11}")
        )
    return "\n".join(lines)


def write_results(
    path: Path, run: str, step: int, model: LanguageModel, dtype: str, results: list[dict[str, Any]]
) -> None:
    """Write a list of objects; an evaluation of the same corpus, context and dtype replaces its own entry."""
    entries = [
        {
            "format_version": FORMAT_VERSION,
            "run": run,
            "step": step,
            "seed": model.seed,
            "stride": result.get("context"),
            "dtype": dtype,
            "code_version": commit() or __version__,
            **result,
        }
        for result in results
    ]
    same = ("run", "step", "corpus", "split", "context", "dtype")
    replaced = {tuple(entry.get(key) for key in same) for entry in entries}
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    kept = [entry for entry in old if tuple(entry.get(key) for key in same) not in replaced]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps([*kept, *entries], indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


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
