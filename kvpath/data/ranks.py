"""What a data module asks of its Trainer: which rank this is, how far the run is, and what the others have."""

from typing import Any

import lightning.pytorch as pl
import torch.distributed
from torch import Tensor


class Ranks:
    """The ranks of a run; without a Trainer there is one, at its first step.

    Args:
        trainer: the Trainer, as soon as there is one.
    """

    def __init__(self, trainer: pl.Trainer | None) -> None:
        self._trainer = trainer
        self.rank: int = trainer.global_rank if trainer else 0
        self.count: int = trainer.world_size if trainer else 1

    @property
    def fit(self) -> bool:
        """Whether they train."""
        return self._trainer is not None and self._trainer.state.fn == "fit"

    @property
    def steps_done(self) -> int:
        """Optimizer steps so far. Lightning restores them before it iterates."""
        return self._trainer.global_step if self._trainer else 0

    def steps_ahead(self, steps: int) -> range:
        """The steps of ``steps`` that training has still to run."""
        done = self.steps_done
        # Lightning sets this attribute without declaring it
        overfit: int | float = getattr(self._trainer, "overfit_batches", 0)
        if overfit:
            n = min(overfit, steps) if isinstance(overfit, int) else int(overfit * steps)
            return range(done % n, n)
        return range(done, steps)

    def total(self, own: Tensor) -> Tensor:
        """The sum over ranks; each must ask for it."""
        if self._trainer is None:
            return own
        total = self._trainer.strategy.reduce(own.to(self._device), reduce_op="sum")
        assert isinstance(total, Tensor)
        return total.cpu()

    def dealt(self, own: Tensor) -> Tensor:
        """The rows of all ranks, of which rank r has every so many from the r-th on; each must ask for them."""
        if self._trainer is None:
            return own
        gathered = self._trainer.strategy.all_gather(own.to(self._device))
        return gathered.reshape(self.count, *own.shape).transpose(0, 1).flatten(0, 1).cpu()

    def first_problem(self, own: str | None) -> str | None:
        """The first problem that a rank has, on every rank, so that none waits for one that has stopped."""
        if self.count == 1 or self._trainer is None:
            return own
        if not self._trainer.strategy.reduce_boolean_decision(own is not None, all=False):
            return None
        problems: list[str | None] = [None] * self.count
        torch.distributed.all_gather_object(problems, own)
        return next(found for found in problems if found)

    @property
    def _device(self) -> Any:
        assert self._trainer is not None
        return self._trainer.strategy.root_device
