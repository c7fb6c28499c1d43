"""What the Trainer's strategy decides of one optimizer step: how gradients are made, measured and applied."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol, cast

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from kvpath.errors import UserError
from kvpath.model.loss import LossSums


class Stepping(Protocol):
    """One optimizer step: `forward` and `backward` for each micro-batch, `clip` once, then `take` or `pass_over`."""

    def forward(self, *arguments: Any, **options: Any) -> LossSums:
        """The module's forward pass."""

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add to the gradients; with the last micro-batch of a step, ranks exchange them."""

    def clip(self, limit: float | None) -> Tensor:
        """The global norm of the gradient, which `take` scales down to `limit`."""

    def take(self) -> None:
        """Apply the gradients."""

    def pass_over(self) -> None:
        """Drop them and count the step, so that schedule and data move on: weights and moments stay as they are."""


class PlainStepping:
    """On one device, or with DDP."""

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.optimizer = cast(LightningOptimizer, module.optimizers())
        self.optimizer.zero_grad()

    def forward(self, *arguments: Any, **options: Any) -> LossSums:
        """The module's forward pass: DDP's own is the one around the whole training step."""
        return cast(LossSums, self.module.forward(*arguments, **options))

    def backward(self, loss: Tensor, last: bool) -> None:
        """Ranks exchange gradients once a step, with the last micro-batch."""
        no_sync = getattr(self.module.trainer.strategy.model, "no_sync", None)
        with nullcontext() if last or no_sync is None else no_sync():
            self.module.manual_backward(loss)

    def clip(self, limit: float | None) -> Tensor:
        """Scale the gradients down at once; gives their norm before that."""
        return clip_grad_norm_(self.module.parameters(), float("inf") if limit is None else limit)

    def take(self) -> None:
        """Apply the gradients."""
        self.optimizer.step()

    def pass_over(self) -> None:
        """Count the step."""
        self.optimizer._on_before_step()
        self.optimizer._on_after_step()


def stepping_for(module: LightningModule) -> Stepping:
    """What the strategy of the module's Trainer asks for: its `stepping`, if it has one.

    Raises:
        UserError: it is Lightning's own for DeepSpeed, which takes steps in another way.
    """
    if getattr(module.trainer.strategy, "strategy_name", "") == "deepspeed" and not hasattr(
        module.trainer.strategy, "stepping"
    ):
        raise UserError("strategy: with DeepSpeed use kvpath.training.deepspeed.strategy.ZeRO")
    make: Callable[[LightningModule], Stepping] = getattr(module.trainer.strategy, "stepping", PlainStepping)
    return make(module)
