"""Tokens from a model: prompts in, continuations out, many rows at once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kvpath.attention import Index
from kvpath.errors import UserError
from kvpath.inference.cache import Cache
from kvpath.inference.memory import refuse_a_cache_that_does_not_fit
from kvpath.inference.sampling import SamplingConfig, choose, row_generator
from kvpath.model.config import BackboneConfig
from kvpath.model.decoder import Decoder

StopReason = Literal["length", "token", "string"]
Step = Callable[[Tensor, Index, Cache], Tensor]


@dataclass
class Row:
    """A prompt and what the model adds to it."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    """The new tokens, one that ended the row included."""

    stop_reason: StopReason | None = None
    """None while the row goes on."""


class Decoding:
    """Rows that a model continues together; iterate to run it.

    Each step gives (row, token) for the rows that go on. A batch gives what each prompt gives alone: rows are padded on
    the left, and each draws from its own generator.

    Args:
        model: the decoder, in whatever mode; it is not changed.
        prompts: token ids that passed `check_prompts`, one prompt a row; equal ones are computed once.
        config: how to draw and when to stop, but for stop strings, which are the business of who has the text.
        first_row: the number of the first row, where this is a part of a larger batch.
        step: a pass of the model, compiled perhaps, for the tokens after the prompts.

    Raises:
        UserError: the cache does not fit into memory. It is allocated when the first step is asked for, not before.
    """

    def __init__(
        self,
        model: Decoder,
        prompts: Sequence[Sequence[int]],
        config: SamplingConfig,
        first_row: int = 0,
        step: Step | None = None,
    ) -> None:
        self.model, self.config, self.first_row = model, config, first_row
        self.rows = [Row(list(prompt)) for prompt in prompts]
        self._step = step or one_pass(model)
        self._generators = [row_generator(config.seed, first_row + row) for row in range(len(prompts))]
        self._stop_tokens = frozenset(config.stop_tokens)
        self._in_batch = list(range(len(prompts)))
        """The rows that the model still computes."""
        self._seen_RV: Tensor | None = None
        self._device, self._dtype = model.embedding.weight.device, computes_in(model.embedding.weight)
        lengths = {len(prompt) for prompt in prompts}
        # The last token is given and never read.
        self._capacity = max(lengths) + config.max_new_tokens - 1
        refuse_a_cache_that_does_not_fit(
            model.layout, len(prompts), self._capacity, self._dtype, self._device, padded=len(lengths) > 1
        )

    def stop(self, row: int, reason: StopReason) -> None:
        """End a row for a reason of the caller's."""
        self.rows[row].stop_reason = reason

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        logits_RV = self._prefill()
        while True:
            chosen = self._choose(logits_RV)
            step = [(row, token) for row, token in self._zip(chosen) if self.rows[row].stop_reason is None]
            for row, token in step:
                self._add(self.rows[row], token)
            yield step
            if all(row.stop_reason for row in self.rows):
                del self._cache  # who made many of these at once holds them all
                return
            logits_RV = self._decode(self._without_ended(chosen))

    def _add(self, row: Row, token: int) -> None:
        row.tokens.append(token)
        if token in self._stop_tokens:
            row.stop_reason = "token"
        elif len(row.tokens) == self.config.max_new_tokens:
            row.stop_reason = "length"

    def _zip(self, chosen_R: Tensor) -> Iterator[tuple[int, int]]:
        return zip(self._in_batch, chosen_R.tolist(), strict=True)

    @torch.no_grad()
    def _prefill(self) -> Tensor:
        """Logits (R, V) after the prompts."""
        places = {prompt: place for place, prompt in enumerate(dict.fromkeys(tuple(row.prompt) for row in self.rows))}
        tokens_BT, valid_BT = _left_padded(list(places), self._device)
        self._cache = Cache(self.model.layout, len(places), self._capacity, dtype=self._dtype, device=self._device)
        logits_RV = one_pass(self.model)(tokens_BT, self._cache.place(tokens_BT, valid_BT), self._cache)
        if len(places) < len(self.rows):
            of_row_R = torch.tensor([places[tuple(row.prompt)] for row in self.rows], device=self._device)
            self._cache.reorder(of_row_R)
            logits_RV = logits_RV[of_row_R]
        if self.config.repetition_penalty != 1:
            self._seen_RV = torch.zeros_like(logits_RV, dtype=torch.bool)
            for seen_V, row in zip(self._seen_RV, self.rows, strict=True):
                seen_V[torch.tensor(row.prompt, device=self._device)] = True
        return logits_RV

    @torch.no_grad()
    def _decode(self, tokens_R: Tensor) -> Tensor:
        """Logits (R, V) after one more token of each row in the batch."""
        tokens_R1 = tokens_R[:, None]
        return self._step(tokens_R1, self._cache.place(tokens_R1), self._cache)

    @torch.no_grad()
    def _choose(self, logits_RV: Tensor) -> Tensor:
        generators = [self._generators[row] for row in self._in_batch]
        chosen_R = choose(logits_RV, self.config, self._seen_RV, generators)
        if self._seen_RV is not None:
            self._seen_RV.scatter_(1, chosen_R[:, None], True)
        return chosen_R

    def _without_ended(self, chosen_R: Tensor) -> Tensor:
        """Drop rows that have ended once they are half of the batch: dropping copies the cache."""
        going_on = [place for place, row in enumerate(self._in_batch) if self.rows[row].stop_reason is None]
        if len(going_on) > len(self._in_batch) / 2:
            return chosen_R
        places = torch.tensor(going_on, device=chosen_R.device)
        self._in_batch = [self._in_batch[place] for place in going_on]
        self._cache.reorder(places)
        self._seen_RV = None if self._seen_RV is None else self._seen_RV[places]
        return chosen_R[places]


def one_pass(model: Decoder) -> Step:
    """Tokens (R, T), where they stand and a cache, to logits (R, V) after the last of them."""

    def step(tokens_RT: Tensor, index: Index, cache: Cache) -> Tensor:
        logits_R1V = model(tokens_RT, index=index, store=cache, wanted=1)
        assert isinstance(logits_R1V, Tensor)
        return logits_R1V[:, -1, : model.config.vocab_size]

    return step


def compiled_pass(model: Decoder) -> Step:
    """The same, compiled once for all lengths of the cache."""
    return torch.compile(one_pass(model), dynamic=True)


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Prompts as one batch: tokens (B, T) and which of them are no padding, None if all are."""
    longest = max(map(len, prompts))
    tokens_BT = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    lengths_B1 = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
    valid_BT = torch.arange(longest, device=device) >= longest - lengths_B1
    return tokens_BT, None if bool(valid_BT.all()) else valid_BT


def computes_in(weight: Tensor) -> torch.dtype:
    """The dtype of keys and values: that of the weights, or of autocast."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def generate(model: Decoder, prompts: Sequence[Sequence[int]], config: SamplingConfig) -> list[Row]:
    """Continue each prompt to its end: the rows of prompt p are p * n to p * n + n - 1.

    Raises:
        UserError: as `check_prompts` and `Decoding` do, or for stop strings: without a tokenizer there is no text.
    """
    if config.stop:
        raise UserError(f"stop strings need a tokenizer (kvpath.load): state stop_tokens, got stop={config.stop!r}")
    check_prompts(prompts, model.config, config.max_new_tokens)
    decoding = Decoding(model, [prompt for prompt in prompts for _ in range(config.n)], config)
    for _ in decoding:
        pass
    return decoding.rows


def check_prompts(prompts: Sequence[Sequence[int]], backbone: BackboneConfig, max_new_tokens: int) -> None:
    """Refuse what cannot be continued, and warn of what the model was not trained for.

    Args:
        prompts: token ids.
        backbone: the model's configuration.
        max_new_tokens: how many tokens are to follow.

    Raises:
        UserError: naming the prompt, the place and the token.
    """
    if not prompts:
        raise UserError("prompts must hold at least one prompt, got none")
    problems: list[str] = []
    for number, prompt in enumerate(prompts):
        if not prompt:
            problems.append(f"prompt {number} is empty: it must hold at least one token")
        unknown = next((place for place, token in enumerate(prompt) if not 0 <= token < backbone.vocab_size), None)
        if unknown is not None:
            problems.append(
                f"prompt {number}: token {prompt[unknown]} at place {unknown} is out of range:"
                f" vocab_size is {backbone.vocab_size}"
            )
    UserError.raise_all(problems)
    context = max(map(len, prompts)) + max_new_tokens
    if context > backbone.max_seq_len:
        from kvpath.training.say import rank_zero_say  # which imports Lightning

        rank_zero_say(
            f"warning: up to {context:,} tokens of context (prompt and max_new_tokens={max_new_tokens:,}) are more than"
            f" the max_seq_len={backbone.max_seq_len:,} that the model is trained for"
        )
