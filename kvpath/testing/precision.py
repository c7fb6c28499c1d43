"""What rounding to bfloat16 costs on the way through a cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvpath.model.decoder import Decoder
from kvpath.testing.routes import Prepare, as_built, compacted, logits, through_cache
from kvpath.testing.toys import Toy, tokens

SEEDS = range(5)
LENGTH = 6


def cached_in_bf16(toy: Toy) -> float:
    """The RMS error of bfloat16 logits through a cache over that of one pass without, both against the float64 truth.

    Over five draws of the weights; the truth has the same rounded weights.
    """
    return _error_ratio(toy, as_built)


def compact_in_bf16(toy: Toy) -> float:
    """As `cached_in_bf16`, by the fast path for decoding."""
    return _error_ratio(toy, compacted)


def _error_ratio(toy: Toy, prepare: Prepare) -> float:
    def through(model: Decoder, tokens_BT: Tensor) -> Tensor:
        return through_cache(prepare(model), tokens_BT, [2])

    return _squared_error(toy, through) ** 0.5 / _squared_error(toy, logits) ** 0.5


def _squared_error(toy: Toy, run: Callable[[Decoder, Tensor], Tensor]) -> float:
    total = 0.0
    for seed in SEEDS:
        model, tokens_BT = toy.decoder(torch.bfloat16, seed), tokens(2, LENGTH, seed=seed)
        truth = logits(toy.decoder(torch.bfloat16, seed).double(), tokens_BT)
        total += float((run(model, tokens_BT).double() - truth).square().sum())
    return total
