"""The scalars of a training run, under the same names for every strategy, and the progress bar.

| name | unit |
|---|---|
| train/loss | nats per token of this optimizer step, over all ranks |
| train/perplexity | exp of it |
| train/learning_rate | of this step |
| train/gradient_norm | global norm before clipping |
| train/tokens | tokens seen so far |
| train/tokens_per_second | over all ranks, since the last line |
| train/mfu | model FLOPs (no recomputation) over the peak of all devices, a fraction |
| train/memory_gb | peak memory of this rank: the device's, or the process's resident set |
| data/stream_hash | of all tokens trained on so far, in their order; 16 hexadecimal digits, in `metrics.jsonl` only |
| train/loss_by_tokens | train/loss with tokens, not steps, on the axis (loggers with an axis) |
| validation/loss, /perplexity, /bits_per_byte | of the held-out region |
"""

import math
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from kvpath.training.cadence import Cadence, Clock
from kvpath.training.metrics_file import MetricsFile
from kvpath.training.module import LanguageModel, Step
from kvpath.training.say import rank_zero_say

BY_TOKENS = "train/loss_by_tokens"


class Watch(Callback):
    """Logs the scalars above at a cadence of its own, to every logger of the Trainer."""

    def __init__(self, every: str = "10 steps", peak_flops: float | None = None) -> None:
        """How often, and what MFU is measured against.

        Args:
            every: As '10 steps', '1M tokens' or '2 minutes'.
            peak_flops: FLOPs per second of one device at the training precision; None measures a matrix product.
        """
        self.cadence = Cadence.parse(every, "every.log")
        self.peak_flops = peak_flops
        self._flops_per_token = 0.0
        self._tokens_per_step = 0
        self._mark = (0, 0.0)
        self.shown: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count FLOPs, measure the peak, start the clock."""
        from kvpath.analysis.audit import audit

        assert isinstance(pl_module, LanguageModel)
        plan = getattr(getattr(trainer, "datamodule", None), "plan", None)
        if plan is not None:
            self._tokens_per_step = plan.tokens_per_step
            self._flops_per_token = audit(pl_module.backbone, context=plan.seq_len).training_flops_per_token
        if self.peak_flops is None:
            self.peak_flops = measured_peak(pl_module.device, training_dtype(trainer))
            rank_zero_say(f"peak of a matrix product on this device: {self.peak_flops / 1e9:,.0f} GFLOP/s")
        self._clock = Clock(self.cadence, max(1, self._tokens_per_step))
        self._mark = (trainer.global_step, time.monotonic())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log if it is due."""
        step = trainer.global_step
        due = self._clock.due(step)
        if self._clock.by_time:
            due = trainer.strategy.broadcast(due)
        if not due:
            return
        report: Step = outputs["step"]
        assert isinstance(pl_module, LanguageModel)
        loss = (pl_module.sum_over_ranks(report.nll) / report.scored.clamp(min=1)).item()
        metrics = {
            "train/loss": loss,
            "train/perplexity": math.exp(min(loss, 700.0)) if loss == loss else loss,
            "train/learning_rate": report.learning_rate,
            "train/gradient_norm": report.gradient_norm.item(),
            "train/tokens": float(step * self._tokens_per_step),
            "train/memory_gb": memory_gb(pl_module.device),
            **self._speed(step, trainer.world_size),
        }
        stream_hash = getattr(getattr(trainer, "datamodule", None), "stream_hash", lambda: None)()
        self.shown = {"loss": loss, "tok/s": metrics.get("train/tokens_per_second", 0.0)}
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile) and stream_hash is not None:
                logger.log_metrics({**metrics, "data/stream_hash": stream_hash}, step)
            else:
                logger.log_metrics(metrics, step)
            if not isinstance(logger, MetricsFile | CSVLogger):  # whose lines are steps
                logger.log_metrics({BY_TOKENS: loss}, step * self._tokens_per_step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Time spent in validation is not training's."""
        if self._mark[1]:
            self._mark = (trainer.global_step, time.monotonic())

    def _speed(self, step: int, world_size: int) -> dict[str, float]:
        (last_step, last_time), now = self._mark, time.monotonic()
        self._mark = (step, now)
        if step == last_step or not self._tokens_per_step:
            return {}
        rate = (step - last_step) * self._tokens_per_step / (now - last_time)
        assert self.peak_flops is not None
        return {
            "train/tokens_per_second": rate,
            "train/mfu": rate * self._flops_per_token / (self.peak_flops * world_size),
        }


class Progress(TQDMProgressBar):
    """A bar over optimizer steps with the loss, tokens per second and the time left."""

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """A resumed run is shown as the whole run, at a rate that counts from the step it resumed at."""
        super().on_train_epoch_start(trainer)
        bar = self.train_progress_bar
        bar.set_description("Training")
        if trainer.max_steps > 0:
            bar.total, bar.initial, bar.n = trainer.max_steps, trainer.global_step, trainer.global_step

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """What stands behind the bar."""
        shown: dict[str, float] = {}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Watch):
                shown = callback.shown
        return {name: f"{value:,.0f}" if name == "tok/s" else f"{value:.3f}" for name, value in shown.items()}


def training_dtype(trainer: Trainer) -> torch.dtype:
    """The dtype of matrix products at the Trainer's precision."""
    precision = str(trainer.precision)
    if precision.startswith("bf16"):
        return torch.bfloat16
    if precision.startswith("16"):
        return torch.float16
    return torch.float64 if precision.startswith("64") else torch.float32


def measured_peak(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """FLOPs per second of a large matrix product on `device`, the best of the runs that fit into `seconds`."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    best, started = math.inf, time.monotonic()
    while best == math.inf or time.monotonic() - started < seconds:
        wait()
        begin = time.perf_counter()
        a @ b
        wait()
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def memory_gb(device: torch.device) -> float:
    """Peak memory in units of 10^9 bytes: allocated on a GPU, else the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
