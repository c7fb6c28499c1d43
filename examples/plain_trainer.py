"""The LightningModule and the DataModule with a plain Trainer: the same run as `kvpath fit`, in Python."""

import sys
import tempfile
from pathlib import Path

from lightning.pytorch import Trainer

from kvpath.attention import KVPathConcat
from kvpath.data import Budget, Files, PackedText, TokenizerConfig
from kvpath.model import BackboneConfig
from kvpath.training import LanguageModel, OptimizerConfig


def main(steps: int) -> float:
    """Train on a text made here; gives the validation loss in nats per token."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(40):
            text = " ".join(f"{number + i} and {i} are {number + 2 * i}." for i in range(50))
            Path(folder, f"{number:02d}.txt").write_text(text, encoding="utf-8")
        data = PackedText(
            source=Files([f"{folder}/*.txt"]),
            tokenizer=TokenizerConfig(name="train", vocab_size=300),
            seq_len=32,
            budget=Budget(tokens=steps * 8 * 32, global_batch_sequences=8, micro_batch=4),
            holdout_every=10,
        )
        backbone = BackboneConfig(
            vocab_size=300,
            d_model=32,
            n_layers=4,
            d_ff=64,
            attention=KVPathConcat(n_heads=4, n_kv_heads=2, head_dim=20, delta_dim=4, path_length=2),
        )
        model = LanguageModel(backbone, OptimizerConfig(learning_rate=3e-3, warmup_steps=5))
        trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=-1)
        trainer.fit(model, data)
        (metrics,) = trainer.validate(model, data, verbose=False)
    return metrics["validation/loss"]


if __name__ == "__main__":
    print(f"validation loss: {main(int(sys.argv[1]) if len(sys.argv) > 1 else 200):.3f}")
