"""A model with its tokenizer: text in, text out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvpath.data.tokenizer import Tokenizer
from kvpath.errors import UserError
from kvpath.inference.generate import Decoding, StopReason, check_prompts, compiled_pass
from kvpath.inference.sampling import SamplingConfig
from kvpath.inference.text import TextRow
from kvpath.model.decoder import Decoder

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Result:
    """One continuation."""

    prompt: Prompt
    """As it was given: text or token ids."""

    sample: int
    """Which of the prompt's n samples."""

    text: str
    """The continuation, without a stop string; empty if there is no tokenizer."""

    tokens: list[int]
    """The new tokens, those that ended it included."""

    stop_reason: StopReason
    """`length` (max_new_tokens), `token` (end of text or a stop token) or `string` (a stop string)."""


@dataclass(frozen=True)
class Piece:
    """Some more text of a row."""

    row: int
    """Sample j of prompt p is row p * n + j."""

    text: str
    """Whole characters; may be empty."""

    result: Result | None = None
    """The whole row, with its last piece."""


class TextModel:
    """A trained model, made by `kvpath.load`.

    Args:
        model: the decoder.
        tokenizer: what its tokens mean; without one, prompts are token ids and results have no text.
        compile: decode by a compiled model: worth its minute for long texts.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer | None, compile: bool = False) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._step = compiled_pass(model) if compile else None

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, batch_size: int | None = None, **sampling: Any
    ) -> list[Result]:
        """Continue each prompt; the samples of a prompt follow each other.

        Args:
            prompts: one or several, each text or token ids.
            batch_size: how many rows run at once; None for all. Results do not depend on it.
            sampling: the fields of `SamplingConfig`.

        Raises:
            UserError: naming the prompt or the field, and what would be right.
        """
        pieces = self.stream(prompts, batch_size=batch_size, **sampling)
        results = {piece.row: piece.result for piece in pieces if piece.result is not None}
        return [results[row] for row in sorted(results)]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], *, batch_size: int | None = None, **sampling: Any
    ) -> Iterator[Piece]:
        """The same as `generate` while it comes: the pieces of a row, joined, are its text.

        Raises:
            UserError: as `generate` does, before the first piece.
        """
        config, several = SamplingConfig(**sampling), self._several(prompts)
        if batch_size is not None and batch_size < 1:
            raise UserError(f"batch_size must be positive, got {batch_size}")
        if self.tokenizer is not None:
            config = replace(config, stop_tokens=[*config.stop_tokens, self.tokenizer.end_of_text])
        elif config.stop:
            raise UserError(f"stop strings need a tokenizer: state stop_tokens, got stop={config.stop!r}")
        ids = [self._encode(prompt, number) for number, prompt in enumerate(several)]
        check_prompts(ids, self.model.config, config.max_new_tokens)
        rows = [prompt for prompt in ids for _ in range(config.n)]
        size = batch_size or len(rows)
        batches = [Decoding(self.model, rows[i : i + size], config, i, self._step) for i in range(0, len(rows), size)]
        return (piece for decoding in batches for piece in self._run(decoding, several, config))

    def _run(self, decoding: Decoding, prompts: list[Prompt], config: SamplingConfig) -> Iterator[Piece]:
        texts = [TextRow(self.tokenizer, row.prompt, config.stop) for row in decoding.rows]
        for step in decoding:
            for place, token in step:
                row, text = decoding.rows[place], texts[place]
                piece = text.push(token)
                if text.stopped:
                    decoding.stop(place, "string")
                if row.stop_reason is None:
                    if piece:
                        yield Piece(decoding.first_row + place, piece)
                    continue
                piece += text.finish()
                prompt, sample = divmod(decoding.first_row + place, config.n)
                result = Result(prompts[prompt], sample, text.text, row.tokens, row.stop_reason)
                yield Piece(decoding.first_row + place, piece, result)

    def _several(self, prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            return [prompts]  # type: ignore[list-item]
        return list(prompts)  # type: ignore[arg-type]

    def _encode(self, prompt: Prompt, number: int) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise UserError(f"prompt {number} is text, and there is no tokenizer: name one, or give token ids")
        return self.tokenizer.encode(prompt)
