"""Perplexity as sums: float64 negative log-likelihoods, int64 counts, reduced over ranks before the division."""

import math
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor
from torchmetrics import Metric


class Perplexity(Metric):
    """Accumulates scored tokens; sums are reduced over ranks before anything is divided (see `summarise`)."""

    full_state_update = False
    nll: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nll", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = ()) -> Self:
        """Moves to devices and keeps its own dtypes: a model cast to bfloat16 must not round the sums."""
        super()._apply(lambda tensor: tensor.to(fn(tensor).device), exclude_state)
        return self

    def update(self, nll: Tensor, count: Tensor) -> None:
        """Add a summed negative log-likelihood in nats and the number of tokens it covers."""
        self.nll += nll.to(torch.float64)
        self.count += count

    def compute(self) -> dict[str, Tensor]:
        """`nll` in nats and `count`, summed over batches and ranks."""
        return {"nll": self.nll, "count": self.count}


def summarise(nll: float, tokens: int, n_bytes: int | None) -> dict[str, float]:
    """Loss (nats per token), perplexity (per token) and, where the bytes are known, bits per byte."""
    loss = nll / tokens
    result = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
    if n_bytes:
        result["bits_per_byte"] = nll / math.log(2) / n_bytes
    return result
