"""A toy module, its data and a Trainer in Python, without the command line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from kvpath.attention import GQA
from kvpath.data import Budget, Files, PackedText, TokenizerConfig
from kvpath.data.loaders import Batch
from kvpath.model import BackboneConfig
from kvpath.model.loss import IGNORE
from kvpath.training import LanguageModel, OptimizerConfig

SEQ_LEN = 16
SEQUENCES = 4


def toy_backbone(**changes: Any) -> BackboneConfig:
    """Two layers of width 16."""
    plain = dict(vocab_size=300, d_model=16, n_layers=2, d_ff=24, max_seq_len=64, init_std=0.1)
    return BackboneConfig(**{**plain, "attention": GQA(n_heads=2, n_kv_heads=1, head_dim=8), **changes})


def toy_module(backbone: BackboneConfig | None = None, **changes: Any) -> LanguageModel:
    """With a learning rate high enough to see."""
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=1)
    return LanguageModel(backbone or toy_backbone(), **{"optimizer": optimizer, **changes})


class Uneven(PackedText):
    """Labels are ignored here and there, so that micro-batches and ranks differ in how many they score."""

    def train_dataloader(self) -> Any:
        """The usual batches with fewer labels."""
        return _Masked(super().train_dataloader())


class _Masked:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            tokens, labels = batch["tokens"], batch["labels"]
            few = (tokens[..., :1] % 2 == 0) & (torch.arange(labels.shape[-1]) > 3)
            yield {"tokens": tokens, "labels": labels.masked_fill(few | (labels % 3 == 0), IGNORE)}


def toy_data(
    corpus: Path, steps: int = 3, micro_batch: int = 2, kind: type[PackedText] = PackedText, **changes: Any
) -> PackedText:
    """`steps` steps of 4 x 16 tokens."""
    budget = Budget(tokens=steps * SEQUENCES * SEQ_LEN, global_batch_sequences=SEQUENCES, micro_batch=micro_batch)
    tokenizer = TokenizerConfig("train", vocab_size=300)
    plain = dict(tokenizer=tokenizer, seq_len=SEQ_LEN, budget=budget, holdout_every=5)
    return kind(Files([str(corpus)]), **{**plain, **changes})


class Record(Callback):
    """Keeps what happened in each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradient_norms: list[float] = []
        self.learning_rates: list[float] = []
        self.tokens: list[Tensor] = []
        self.validated: list[int] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, _: int
    ) -> None:
        """Take the step's report."""
        assert isinstance(pl_module, LanguageModel)
        step = outputs["step"]
        self.losses.append((pl_module.sum_over_ranks(step.nll.clone()) / step.scored).item())
        self.gradient_norms.append(step.gradient_norm.item())
        self.learning_rates.append(step.learning_rate)
        self.tokens.append(batch["tokens"].flatten())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the step's number."""
        self.validated.append(trainer.global_step)


def toy_trainer(*callbacks: Callback, **changes: Any) -> Trainer:
    """Silent, on one CPU, writing nothing."""
    plain = dict(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
    )
    return Trainer(**{**plain, **changes})


def fitted(data: PackedText, module: LanguageModel | None = None, **trainer: Any) -> tuple[LanguageModel, Record]:
    """A module after training, and what happened."""
    module, record = module or toy_module(), Record()
    toy_trainer(record, **trainer).fit(module, data)
    return module, record


def weights(module: LanguageModel) -> Tensor:
    """All of them in one vector."""
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach()
