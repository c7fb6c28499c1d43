"""From logits to the next token: how to draw, as pure functions over logits (R, V), one row a sequence."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvpath.errors import UserError


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How to continue a prompt.

    Raises:
        UserError: every problem found, each naming the field and the value.
    """

    max_new_tokens: int = 128
    """How many tokens to add at most."""

    temperature: float = 0.8
    """0 takes the likeliest token; else logits are divided by it before drawing."""

    top_k: int | None = None
    """Draw among so many likeliest tokens only."""

    top_p: float | None = None
    """Draw among the fewest likeliest tokens whose probabilities sum to at least this."""

    min_p: float | None = None
    """Draw among tokens at least this fraction as likely as the likeliest."""

    repetition_penalty: float = 1.0
    """Tokens of the prompt and of the text so far lose by this factor; 1 changes nothing."""

    stop: Sequence[str] = ()
    """A row ends before the first of these strings; what is left of it is not in the text."""

    stop_tokens: Sequence[int] = ()
    """A row ends with any of these tokens, and with the tokenizer's end-of-text token."""

    n: int = 1
    """Samples for each prompt."""

    seed: int = 0
    """Row i (sample j of prompt p is row p * n + j) draws from a generator of its own, seeded by (seed, i)."""

    def __post_init__(self) -> None:
        UserError.raise_all(self.problems())

    def problems(self) -> Iterator[str]:
        """What is wrong with the fields, one line each."""
        for name in ("max_new_tokens", "n"):
            if getattr(self, name) < 1:
                yield f"{name} must be positive, got {getattr(self, name)}"
        if self.seed < 0:
            yield f"seed must not be negative, got {self.seed}"
        if not 0 <= self.temperature < float("inf"):
            yield f"temperature must be 0 or more, got {self.temperature}"
        if self.top_k is not None and self.top_k < 1:
            yield f"top_k must be positive, got {self.top_k}"
        if self.top_p is not None and not 0 < self.top_p <= 1:
            yield f"top_p must be above 0 and at most 1, got {self.top_p}"
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            yield f"min_p must be between 0 and 1, got {self.min_p}"
        if not 0 < self.repetition_penalty < float("inf"):
            yield f"repetition_penalty must be positive, got {self.repetition_penalty}"
        if isinstance(self.stop, str) or "" in self.stop:
            yield f"stop must be a list of strings that are not empty, got {self.stop!r}"
        if self.n > 1 and self.temperature == 0:
            yield f"n={self.n} samples at temperature 0 are all the same: raise temperature or leave n at 1"


def penalise_repetition(logits_RV: Tensor, seen_RV: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of the tokens that were seen by `penalty`, and multiply negative ones."""
    if penalty == 1:
        return logits_RV
    lower_RV = torch.where(logits_RV > 0, logits_RV / penalty, logits_RV * penalty)
    return torch.where(seen_RV, lower_RV, logits_RV)


def keep_top_k(logits_RV: Tensor, k: int) -> Tensor:
    """The k largest logits of each row, -inf elsewhere; the first of equals are kept."""
    return _drop(logits_RV, lambda sorted_RV: torch.arange(sorted_RV.shape[-1], device=sorted_RV.device) >= k)


def keep_top_p(logits_RV: Tensor, p: float) -> Tensor:
    """The fewest largest logits of each row whose probabilities sum to at least `p`, -inf elsewhere."""

    def beyond(sorted_RV: Tensor) -> Tensor:
        probabilities_RV = sorted_RV.softmax(dim=-1)
        return probabilities_RV.cumsum(dim=-1) - probabilities_RV >= p

    return _drop(logits_RV, beyond) if p < 1 else logits_RV


def keep_min_p(logits_RV: Tensor, fraction: float) -> Tensor:
    """The logits of tokens at least `fraction` as likely as the row's likeliest, -inf elsewhere."""
    if fraction == 0:
        return logits_RV
    least_R1 = logits_RV.amax(dim=-1, keepdim=True) + np.log(fraction)
    return logits_RV.masked_fill(logits_RV < least_R1, -torch.inf)


def probabilities(logits_RV: Tensor, config: SamplingConfig) -> Tensor:
    """What is drawn from, (R, V) float64: temperature, then top-k, top-p and min-p.

    Args:
        logits_RV: any dtype, repetitions penalised already.
        config: its temperature is not 0.
    """
    logits_RV = logits_RV.double() / config.temperature
    if config.top_k is not None and config.top_k < logits_RV.shape[-1]:
        logits_RV = keep_top_k(logits_RV, config.top_k)
    if config.top_p is not None:
        logits_RV = keep_top_p(logits_RV, config.top_p)
    if config.min_p is not None:
        logits_RV = keep_min_p(logits_RV, config.min_p)
    return logits_RV.softmax(dim=-1)


def draw(probabilities_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The token (R,) at which the sum of each row's probabilities first exceeds a number from [0, 1)."""
    sums_RV = probabilities_RV.cumsum(dim=-1)
    total_R1 = sums_RV[:, -1:]
    # Rounding must not reach the total, beyond which there is no token.
    wanted_R1 = torch.minimum(uniform_R[:, None] * total_R1, total_R1.nextafter(torch.zeros_like(total_R1)))
    return torch.searchsorted(sums_RV, wanted_R1, right=True)[:, 0]


def row_generator(seed: int, row: int) -> torch.Generator:
    """The generator of one row, whatever else is in the batch."""
    (mixed,) = np.random.SeedSequence([seed, row]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed) >> 1)


def choose(
    logits_RV: Tensor, config: SamplingConfig, seen_RV: Tensor | None, generators: Sequence[torch.Generator]
) -> Tensor:
    """The next token of each row, (R,) int64.

    Args:
        logits_RV: any dtype, of the real vocabulary only.
        config: how.
        seen_RV: bool, which tokens each row holds; None without a repetition penalty.
        generators: one a row; each gives one number, and none at temperature 0.
    """
    if seen_RV is not None:
        logits_RV = penalise_repetition(logits_RV, seen_RV, config.repetition_penalty)
    if config.temperature == 0:
        return logits_RV.argmax(dim=-1)
    uniform = [torch.rand((), dtype=torch.float64, generator=generator) for generator in generators]
    return draw(probabilities(logits_RV, config), torch.stack(uniform).to(logits_RV.device))


def _drop(logits_RV: Tensor, beyond: Callable[[Tensor], Tensor]) -> Tensor:
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    dropped_RV = beyond(sorted_RV).expand_as(order_RV)
    return logits_RV.masked_fill(torch.zeros_like(dropped_RV).scatter(-1, order_RV, dropped_RV), -torch.inf)
