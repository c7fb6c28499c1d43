"""Our models in lm-evaluation-harness, as `kvpath`. Importing this registers it; it needs the extra `eval`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from kvpath.errors import UserError
from kvpath.evaluation.continuations import Continuation, Score, batches, score
from kvpath.evaluation.harness_ranks import Ranks
from kvpath.evaluation.harness_sampling import sampling_fields
from kvpath.inference.load import load
from kvpath.inference.text_model import TextModel
from kvpath.training.say import rank_zero_say
from kvpath.version import __version__

AUTO_TOKENS = 2**14
"""Tokens of a pass where the batch size is left to us."""

Pair = tuple[tuple[str, str] | None, list[int], list[int]]
"""Texts of a request, if it has them, and the tokens of its context and continuation."""


@register_model("kvpath")
class KvpathLM(Ranks, TemplateLM):  # type: ignore[misc]
    """A trained model as the harness asks of one. Text is read as text: nothing in it becomes a special token.

    Args:
        ckpt_path: a run, a checkpoint or an exported directory; or a model that `kvpath.load` gave.
        pretrained: the same by the name that the harness calls its results by.
        device: as in `kvpath.load`, but the CPU for cuda where there is none; each of several ranks takes its own.
        dtype: of the weights: fp32, bf16, fp16 or fp64; None for that in which they are stored.
        tokenizer: a `tokenizer.json`; None for that of the run.
        compile: generate by a compiled model.
        max_length: tokens of context at most; None for the model's max_seq_len.
        max_gen_toks: tokens to generate where a task does not say.
        batch_size: rows of a pass; `auto` takes as many of max_length as make 16,384 tokens.
        max_batch_size: the most that `auto` takes.
        others: nothing.

    Raises:
        UserError: naming the argument and what would be right, or what is wrong with the checkpoint.
    """

    def __init__(
        self,
        ckpt_path: str | Path | TextModel | None = None,
        *,
        pretrained: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        tokenizer: str | None = None,
        compile: bool = False,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        UserError.raise_all(
            f"model_args: there is no {name}; there are ckpt_path, dtype, tokenizer, compile, max_length, max_gen_toks"
            for name in others
        )
        if (ckpt_path is None) == (pretrained is None):
            raise UserError("model_args must name one run as ckpt_path or pretrained")
        ckpt_path = pretrained if ckpt_path is None else ckpt_path
        assert ckpt_path is not None
        self.meet()
        if not isinstance(ckpt_path, TextModel):
            ckpt_path = load(
                ckpt_path, device=self.own_device(device), dtype=dtype, tokenizer=tokenizer, compile=compile
            )
        self.model, found = ckpt_path, ckpt_path.tokenizer
        if found is None:
            raise UserError("there is no tokenizer beside these weights; --model_args tokenizer=FILE names one")
        self._tokens = found
        self.max_length = max_length or self.model.model.config.max_seq_len
        self.max_gen_toks = max_gen_toks
        self.batch_size = _rows(batch_size, self.max_length, max_batch_size)
        self._device = self.model.model.embedding.weight.device

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token, which also stands before a text that has no context."""
        return self._tokens.end_of_text

    @property
    def tokenizer_name(self) -> str:
        """What cached requests are told apart by."""
        return self._tokens.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, nothing added: our models are trained without a first token of their own."""
        return self._tokens.encode(string)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """There is none.

        Raises:
            UserError: always.
        """
        raise UserError("apply_chat_template: these are models of plain text, which have no chat template; drop it")

    def get_model_info(self) -> dict[str, Any]:
        """What the harness puts into its results beside its own settings."""
        weights = self.model.model
        return {
            "model_num_parameters": sum(parameter.numel() for parameter in weights.parameters()),
            "model_dtype": str(weights.embedding.weight.dtype),
            "max_length": self.max_length,
            "kvpath_version": __version__,
        }

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        wanted = [self._continuation(context, tokens) for _, context, tokens in requests]
        cut = sum(len(kept.context) < len(context) for kept, (_, context, _) in zip(wanted, requests, strict=True))
        self._say_cut(cut, len(requests))
        answers: dict[int, tuple[float, bool]] = {}
        for place, found in self._scored(wanted, "Running loglikelihood requests", disable_tqdm):
            answers[place] = (found.log_likelihood, found.is_greedy)
            texts = requests[place][0]
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answers[place])
        return [answers[place] for place in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text in nats, each token by one window of at most max_length."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            rolling = get_rolling_token_windows(self.tok_encode(request.args[0]), self.eot_token_id, self.max_length, 1)
            for context, tokens in map(make_disjoint_window, rolling):
                windows.append(Continuation(tuple(context), tuple(tokens)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for place, found in self._scored(windows, "Running loglikelihood_rolling requests", disable_tqdm):
            totals[owners[place]] += found.log_likelihood
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, without the string that ended it."""
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(place)
        answers: dict[int, str] = {}
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running generate_until requests")
        for places in groups.values():
            sampling = sampling_fields(requests[places[0]].args[1], self.max_gen_toks)
            room = self.max_length - sampling["max_new_tokens"]
            if room < 1:
                raise UserError(
                    f"max_gen_toks={sampling['max_new_tokens']} must be below max_length={self.max_length}, so that a"
                    " context fits before"
                )
            prompts = {place: self.tok_encode(requests[place].args[0]) or [self.eot_token_id] for place in places}
            self._say_cut(sum(len(prompt) > room for prompt in prompts.values()), len(places))
            longest_first = sorted(places, key=lambda place: -len(prompts[place]))
            rows = [prompts[place][-room:] for place in longest_first]
            for piece in self.model.stream(rows, batch_size=self.batch_size, **sampling):
                if piece.result is not None:
                    place = longest_first[piece.row]
                    answers[place] = piece.result.text
                    self.cache_hook.add_partial("generate_until", requests[place].args, piece.result.text)
                    bar.update()
        bar.close()
        return [answers[place] for place in range(len(requests))]

    def _continuation(self, context: list[int], tokens: list[int]) -> Continuation:
        """As much of the context as max_length leaves; the last token is not read."""
        if len(tokens) > self.max_length:
            raise UserError(f"a continuation of {len(tokens)} tokens does not fit into max_length={self.max_length}")
        room = self.max_length + 1 - len(tokens)
        return Continuation(tuple((context or [self.eot_token_id])[-room:]), tuple(tokens))

    def _say_cut(self, cut: int, of: int) -> None:
        if cut:
            rank_zero_say(
                f"warning: {cut:,} of {of:,} contexts are cut from the left to fit into max_length={self.max_length:,}"
            )

    def _scored(self, wanted: list[Continuation], what: str, quiet: bool) -> Iterator[tuple[int, Score]]:
        bar = tqdm(total=len(wanted), disable=quiet or self.rank != 0, desc=what)
        for places in batches(wanted, self.batch_size):
            yield from zip(places, score(self.model.model, [wanted[place] for place in places]), strict=True)
            bar.update(len(places))
        bar.close()


def _rows(batch_size: int | str, max_length: int, most: int | None) -> int:
    if str(batch_size).split(":")[0] == "auto":
        rows = max(1, AUTO_TOKENS // max_length)
        return min(rows, most) if most else rows
    if not str(batch_size).isdecimal() or int(batch_size) < 1:
        raise UserError(f"batch_size must be a positive number or auto, got {batch_size}")
    return int(batch_size)
