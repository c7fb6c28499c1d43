"""What a model is evaluated on: regions of corpora, each at one context length."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvpath.data.packing import TokenRun, Windows
from kvpath.data.regions import Corpus, Split
from kvpath.data.retrieval.examples import Examples
from kvpath.data.retrieval.task import Task
from kvpath.data.sliding import SlidingWindows
from kvpath.data.sources import Source
from kvpath.data.tokenizer import Tokenizer
from kvpath.errors import UserError

_TOKENS_AT_A_TIME = 2**22

EvaluationWindows = Windows | SlidingWindows | Examples


@dataclass
class EvaluatedText:
    """What one name under data.evaluate stands for.

    Args:
        source: its documents.
        region: which of those that holdout_every holds out. Without holdout_every it is only a name in the results.
        holdout_every: of every so many documents of the source, one is for validation and one for testing; null
            evaluates on all of them. State that of the training data where a model was trained on this source.
        limit_tokens: score the first so many tokens; no more is read. Null is all of it.
    """

    source: Source
    region: Literal["validation", "test"] = "test"
    holdout_every: int | None = None
    limit_tokens: int | None = None

    def problems(self, name: str) -> Iterator[str]:
        """What is wrong with its fields."""
        if isinstance(self.source, Task):
            yield from (f"evaluate.{name}.source.{problem}" for problem in self.source.problems())
            for field in ("holdout_every", "limit_tokens"):
                if (value := getattr(self, field)) is not None:
                    yield f"evaluate.{name}.{field} must be null, got {value}: source.eval_examples says how many"
        for field, value, least in (("holdout_every", self.holdout_every, 3), ("limit_tokens", self.limit_tokens, 1)):
            if value is not None and value < least:
                yield f"evaluate.{name}.{field} must be at least {least}, got {value}"

    def corpus(self, name: str, tokenizer: Tokenizer) -> Corpus:
        """The region, tokenised on first use.

        Raises:
            UserError: it cannot be read; begins with the name.
        """
        limit = None if self.limit_tokens is None else self.limit_tokens + 1
        split = Split(self.holdout_every, self.region if self.holdout_every is None else None, limit)
        with named(name):
            return self.source.corpora(tokenizer, split)[self.region]

    def check(self, name: str) -> None:
        """See `Source.check`."""
        with named(name):
            self.source.check()


@contextmanager
def named(name: str) -> Iterator[None]:
    """Mistakes begin with what the text is called."""
    try:
        yield
    except UserError as error:
        raise UserError(f"data.evaluate.{name}: {error}") from error


@dataclass(frozen=True)
class Evaluation:
    """One loader of an evaluation: a region of a corpus, read at one context length.

    Args:
        corpus: what the source is called.
        split: the region: validation or test.
        context: tokens in a window.
        stride: tokens from one window to the next; less than the context where windows overlap.
        n_tokens: tokens scored, over all ranks: all of the region but the first, or but the first of each document.
        n_bytes: UTF-8 bytes of the text that the scored tokens stand for.
        fingerprint: of the tokens, of where documents end, and of the tokenizer: 64 hexadecimal digits. The same at
            every context and stride, for every model and however the tokens are stored.
    """

    corpus: str
    split: str
    context: int
    stride: int
    n_tokens: int
    n_bytes: int
    fingerprint: str

    def stated(self) -> dict[str, Any]:
        """What tells its result from others."""
        return {name: getattr(self, name) for name in ("corpus", "split", "context", "stride", "fingerprint")}


def evaluate_at(
    contexts: list[int],
    corpus: Corpus,
    tokenizer: Tokenizer,
    limit_tokens: int | None,
    documents_alone: bool,
    stride: int | None = None,
    name: str | None = None,
) -> list[tuple[Evaluation, EvaluationWindows]]:
    """A region at several context lengths.

    Args:
        contexts: the lengths.
        corpus: the region.
        tokenizer: counts the bytes of what is scored.
        limit_tokens: score the first so many tokens only.
        documents_alone: documents do not see each other, so that their first tokens are not scored.
        stride: tokens from one window to the next; None is the context.
        name: what to call the corpus in results; None is its label.

    Raises:
        UserError: the region is shorter than a window.
    """
    manifest = corpus.manifest
    tokens: TokenRun = corpus.tokens
    if limit_tokens is not None and limit_tokens + 1 < manifest.n_tokens:
        tokens = corpus.tokens[: limit_tokens + 1]
        n_bytes = tokenizer.count_bytes(tokens[1:])
    else:
        n_bytes = manifest.n_bytes - tokenizer.count_bytes(tokens[:1])
    n_tokens = max(0, len(tokens) - 1)
    if not n_tokens:
        remedy = "its files hold no text" if name else "state a smaller data.holdout_every, or text of its own"
        raise UserError(f"{name or manifest.label}, {manifest.region}: there are no tokens to score; {remedy}")
    UserError.raise_all(
        f"{name or manifest.label}, {manifest.region}: {n_tokens} tokens to score are fewer than one window of"
        f" {context}; state shorter data.eval_contexts"
        for context in contexts
        if n_tokens < context
    )
    if documents_alone:
        whole = np.asarray(tokens[: len(tokens)])
        not_scored = whole[1:][whole[:-1] == tokenizer.end_of_text]
        n_tokens, n_bytes = n_tokens - len(not_scored), n_bytes - tokenizer.count_bytes(not_scored)
    label, fingerprint = name or manifest.label, fingerprint_of(tokens, tokenizer, documents_alone)
    return [
        (
            Evaluation(label, manifest.region, context, stride or context, n_tokens, n_bytes, fingerprint),
            SlidingWindows(tokens, context, stride)
            if stride not in (None, context)
            else Windows(tokens, context, short_last=True),
        )
        for context in contexts
    ]


def fingerprint_of(tokens: TokenRun, tokenizer: Tokenizer, documents_alone: bool = False) -> str:
    """A hash of a region's tokens and of its tokenizer, which says what token ends a document and stands nowhere else.

    Args:
        tokens: the region.
        tokenizer: what made them.
        documents_alone: the first token of each document is not scored, which makes another region of it.
    """
    found = hashlib.sha256(f"{tokenizer.fingerprint}{' alone' * documents_alone}\n".encode())
    for start in range(0, len(tokens), _TOKENS_AT_A_TIME):
        found.update(tokens[start : start + _TOKENS_AT_A_TIME].astype("<u4").tobytes())
    return found.hexdigest()
