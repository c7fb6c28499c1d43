"""AdamW, clipping, and a learning rate that is a pure function of the optimizer step."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvpath.errors import UserError


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with warm-up and cosine decay.

    Raises:
        UserError: every problem found, each naming the field and the value.
    """

    learning_rate: float = 1e-3
    """Peak learning rate."""

    warmup_steps: int = 100
    """Optimizer steps of linear warm-up."""

    final_fraction: float = 0.1
    """The cosine ends at this fraction of the peak."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's two moments."""

    eps: float = 1e-8
    """AdamW's epsilon."""

    weight_decay: float = 0.1
    """Decay of parameters with two or more dimensions; vectors are never decayed."""

    clip_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; None leaves them."""

    def __post_init__(self) -> None:
        UserError.raise_all(self.problems())

    def problems(self) -> Iterator[str]:
        """What is wrong with the fields, one line each."""
        for name in ("learning_rate", "eps", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                yield f"optimizer.{name} must be positive, got {value}"
        for name in ("warmup_steps", "weight_decay"):
            if getattr(self, name) < 0:
                yield f"optimizer.{name} must not be negative, got {getattr(self, name)}"
        if not 0 <= self.final_fraction <= 1:
            yield f"optimizer.final_fraction must be between 0 and 1, got {self.final_fraction}"
        if any(not 0 <= beta < 1 for beta in self.betas):
            yield f"optimizer.betas must be at least 0 and below 1, got {self.betas}"

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0, of a run of `total_steps`."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps))
        floor = self.final_fraction
        return self.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))

    def build(self, module: nn.Module) -> torch.optim.AdamW:
        """AdamW over all parameters of `module`, in its fused form where the device has one."""
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if _dimensions(p) >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if _dimensions(p) < 2], "weight_decay": 0.0},
        ]
        fused = {parameter.device.type for parameter in parameters} <= {"cpu", "cuda"}
        return torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas, eps=self.eps, fused=fused)


def _dimensions(parameter: nn.Parameter) -> int:
    # With ZeRO-3 a rank holds a flat part of each, and its shape beside it.
    return len(getattr(parameter, "ds_shape", parameter.shape))
