"""What a model is evaluated on: regions of corpora, each at one context length."""

from dataclasses import dataclass

import numpy as np

from kvpath.data.packing import TokenRun, Windows
from kvpath.data.regions import Corpus
from kvpath.data.tokenizer import Tokenizer
from kvpath.errors import UserError


@dataclass(frozen=True)
class Evaluation:
    """One loader of an evaluation: a region of a corpus, read at one context length.

    Args:
        corpus: what the source is called.
        split: the region: validation or test.
        context: tokens in a window; windows do not overlap, so this is the stride too.
        n_tokens: tokens scored, over all ranks: all of the region but the first, or but the first of each document.
        n_bytes: UTF-8 bytes of the text that the scored tokens stand for.
    """

    corpus: str
    split: str
    context: int
    n_tokens: int
    n_bytes: int


def evaluate_at(
    contexts: list[int], corpus: Corpus, tokenizer: Tokenizer, limit_tokens: int | None, documents_alone: bool
) -> list[tuple[Evaluation, Windows]]:
    """A region at several context lengths.

    Args:
        contexts: the lengths.
        corpus: the region.
        tokenizer: counts the bytes of what is scored.
        limit_tokens: score the first so many tokens only.
        documents_alone: documents do not see each other, so that their first tokens are not scored.

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
    UserError.raise_all(
        f"{manifest.label}, {manifest.region}: {n_tokens} tokens to score are fewer than one window of {context}"
        for context in contexts
        if n_tokens < context
    )
    if documents_alone:
        whole = np.asarray(tokens[: len(tokens)])
        not_scored = whole[1:][whole[:-1] == tokenizer.end_of_text]
        n_tokens, n_bytes = n_tokens - len(not_scored), n_bytes - tokenizer.count_bytes(not_scored)
    return [
        (
            Evaluation(manifest.label, manifest.region, context, n_tokens, n_bytes),
            Windows(tokens, context, short_last=True),
        )
        for context in contexts
    ]
