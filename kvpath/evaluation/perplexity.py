"""Perplexity as sums: float64 negative log-likelihoods, int64 counts, reduced over ranks before the division."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from torchmetrics import Metric

from kvpath.model.batch import Batch, index_of
from kvpath.model.decoder import Decoder
from kvpath.model.loss import IGNORE, LossSums


class Perplexity(Metric):
    """Accumulates scored tokens by their place in the window; sums are reduced over ranks before anything is divided.

    Every rank must see windows of the same length (see `summarise` and `by_position`).
    """

    full_state_update = False
    nll: Tensor
    count: Tensor
    through_cache = False
    """Every label is scored in one pass."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nll", torch.zeros(0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(0, dtype=torch.int64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = ()) -> Self:
        """Moves to devices and keeps its own dtypes: a model cast to bfloat16 must not round the sums."""
        super()._apply(lambda tensor: tensor.to(fn(tensor).device), exclude_state)
        return self

    def read(self, model: Decoder, batch: Batch) -> None:
        """Score tokens against labels, both (B, C)."""
        self.update(nll_of(model, batch), batch["labels"] != IGNORE)

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

    def result(self, known: Any) -> dict[str, Any] | None:
        """What it comes to, None if nothing was scored; every rank must call it.

        Args:
            known: what the data says of what was scored (see `Evaluation`), None if it says nothing.
        """
        sums = {name: value.cpu() for name, value in self.compute().items()}
        nll, tokens = float(sums["nll"].sum()), int(sums["count"].sum())
        if tokens == 0:
            return None
        # Bytes are those of the whole region: without all of it there are no bits per byte.
        n_bytes = known.n_bytes if known is not None and known.n_tokens == tokens else None
        return {
            "tokens": tokens,
            "bytes": n_bytes,
            "nll_sum": nll,
            **summarise(nll, tokens, n_bytes),
            "by_position": by_position(sums["nll"], sums["count"]),
        }


def nll_of(model: Decoder, batch: Batch) -> Tensor:
    """The negative log-likelihood in nats of each label, (B, C) float32; zero where nothing is scored."""
    sums = model(batch["tokens"], batch["labels"], index=index_of(batch))
    assert isinstance(sums, LossSums)
    return sums.nll_BT


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
