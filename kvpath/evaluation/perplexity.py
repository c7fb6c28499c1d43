"""Perplexity as sums: float64 negative log-likelihoods, int64 counts, reduced over ranks before the division."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from torchmetrics import Metric


class Perplexity(Metric):
    """Accumulates scored tokens by their place in the window; sums are reduced over ranks before anything is divided.

    Every rank must see windows of the same length (see `summarise` and `by_position`).
    """

    full_state_update = False
    nll: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nll", torch.zeros(0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(0, dtype=torch.int64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = ()) -> Self:
        """Moves to devices and keeps its own dtypes: a model cast to bfloat16 must not round the sums."""
        super()._apply(lambda tensor: tensor.to(fn(tensor).device), exclude_state)
        return self

    def update(self, nll_BC: Tensor, scored_BC: Tensor) -> None:
        """Add the negative log-likelihood in nats of each label, 0 where none is scored, and which are."""
        length = nll_BC.shape[1]
        if (more := length - len(self.nll)) > 0:
            self.nll, self.count = pad(self.nll, (0, more)), pad(self.count, (0, more))
        self.nll[:length] += nll_BC.sum(0, dtype=torch.float64)
        self.count[:length] += scored_BC.sum(0)

    def compute(self) -> dict[str, Tensor]:
        """`nll` in nats and `count`, (C,) by place in the window, summed over batches and ranks."""
        return {"nll": self.nll, "count": self.count}


def summarise(nll: float, tokens: int, n_bytes: int | None) -> dict[str, float]:
    """Loss (nats per token), perplexity (per token) and, where the bytes are known, bits per byte."""
    loss = nll / tokens
    result = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
    if n_bytes:
        result["bits_per_byte"] = nll / math.log(2) / n_bytes
    return result


def by_position(nll_C: Tensor, count_C: Tensor) -> list[dict[str, Any]]:
    """Sums by place in the window, in buckets that double: [0, 1), [1, 2), [2, 4), ... up to C.

    >>> [(bucket["from"], bucket["to"]) for bucket in by_position(torch.zeros(6), torch.zeros(6))]
    [(0, 1), (1, 2), (2, 4), (4, 6)]
    """
    edges, context = [0, 1], len(nll_C)
    while edges[-1] < context:
        edges.append(min(2 * edges[-1], context))
    return [
        {"from": start, "to": stop, "tokens": int(count_C[start:stop].sum()), "nll_sum": float(nll_C[start:stop].sum())}
        for start, stop in zip(edges, edges[1:], strict=False)
    ]
