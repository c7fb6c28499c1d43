"""A text sample at each validation."""

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from kvpath.inference.generate import generate
from kvpath.inference.sampling import SamplingConfig
from kvpath.training.module import LanguageModel


class TextSample(Callback):
    """Continues a prompt after each validation: to `samples.jsonl` of the run and to loggers that take text."""

    def __init__(self, prompt: str = "", tokens: int = 64, temperature: float = 0.8, path: Path | None = None) -> None:
        """What to continue and how.

        Args:
            prompt: Text to continue; empty starts a document.
            tokens: How many tokens to add.
            temperature: 0 takes the likeliest token; else the draw, which is the same at every validation, is softer.
            path: A file to append to; None for loggers only.
        """
        self.prompt, self.tokens, self.temperature, self.path = prompt, tokens, temperature, path

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sample, except in the sanity check before training."""
        tokenizer = getattr(getattr(trainer, "datamodule", None), "tokenizer", None)
        together = getattr(trainer.strategy, "shards_weights", False)
        if trainer.sanity_checking or tokenizer is None or not (trainer.is_global_zero or together):
            return
        assert isinstance(pl_module, LanguageModel)
        text = self.sample(pl_module, tokenizer)
        if not trainer.is_global_zero:
            return
        if self.path is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": trainer.global_step, "text": text}, ensure_ascii=False) + "\n")
        for logger in trainer.loggers:
            add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
            if add_text is not None:
                add_text("sample", text, trainer.global_step)

    def sample(self, module: LanguageModel, tokenizer: Any) -> str:
        """The prompt and its continuation."""
        prompt = tokenizer.encode(self.prompt) or [tokenizer.end_of_text]
        config = SamplingConfig(
            max_new_tokens=self.tokens,
            temperature=self.temperature,
            stop_tokens=[tokenizer.end_of_text],
            seed=module.seed,
        )
        device = module.device.type
        with torch.autocast(device, torch.bfloat16, enabled="bf16-mixed" in str(module.trainer.precision)):
            (row,) = generate(module.decoder, [prompt], config)
        return self.prompt + str(tokenizer.decode(row.tokens))
