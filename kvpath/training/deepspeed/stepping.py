"""One optimizer step through DeepSpeed's engine, which exchanges, clips and applies gradients itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from kvpath.model.loss import LossSums


class EngineStepping:
    """As `kvpath.training.stepping.Stepping` asks; the engine's accumulation is off, since it would divide the loss."""

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.engine = cast(Any, module.trainer.strategy.model)
        self.engine.set_gradient_accumulation_boundary(False)

    def forward(self, *arguments: Any, **options: Any) -> LossSums:
        """The module's forward pass inside of the engine's, which counts micro-batches."""
        return cast(LossSums, self.engine(*arguments, **options))

    def backward(self, loss: Tensor, last: bool) -> None:
        """Stages 2 and 3 exchange gradients with each micro-batch, stage 1 with the last."""
        if last:
            self.engine.set_gradient_accumulation_boundary(True)
        self.module.manual_backward(loss)

    def clip(self, limit: float | None) -> Tensor:
        """The norm of the gradient, infinite if it is not finite; `take` clips by the limit that the engine has."""
        zero = self.engine.optimizer
        if hasattr(zero, "_wait_for_offload_copies"):
            zero._wait_for_offload_copies()
        norms = zero._get_norm_groups() if _is_stage_3(zero) else [zero.scaled_global_norm()]
        norm = torch.linalg.vector_norm(torch.stack([torch.as_tensor(part, dtype=torch.float32) for part in norms]))
        # DeepSpeed says -1 for what is not finite.
        finite = torch.stack([torch.as_tensor(part) >= 0 for part in norms]).all()
        return torch.where(finite, norm, torch.full_like(norm, float("inf")))

    def take(self) -> None:
        """Apply the gradients."""
        cast(LightningOptimizer, self.module.optimizers()).step()

    def pass_over(self) -> None:
        """DeepSpeed drops gradients of infinite norm and leaves all else: have it believe that they are."""
        with _infinite_norm(self.engine.optimizer):
            self.take()


def _is_stage_3(zero: Any) -> bool:
    return hasattr(zero, "_get_norm_groups")


@contextmanager
def _infinite_norm(zero: Any) -> Iterator[None]:
    infinite = torch.tensor(float("inf"))
    said = (
        {"_get_norm_groups": lambda: [infinite]}
        if _is_stage_3(zero)
        else {"scaled_global_norm": lambda: infinite, "check_grad_overflow": True}
    )
    before = {name: value for name, value in vars(zero).items() if name in said}
    vars(zero).update(said)
    try:
        yield
    finally:
        for name in said:
            del vars(zero)[name]
        vars(zero).update(before)
