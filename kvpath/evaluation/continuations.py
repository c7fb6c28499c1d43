"""How likely a model finds given continuations of given contexts, many at once."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpath.model.decoder import Decoder


class Continuation(NamedTuple):
    """What is to be scored: every token of `tokens`, after `context` and those before it."""

    context: tuple[int, ...]
    """At least one token id."""

    tokens: tuple[int, ...]

    @property
    def read(self) -> tuple[int, ...]:
        """What the model reads: the last token is only predicted."""
        return (*self.context, *self.tokens)[:-1]


class Score(NamedTuple):
    """What a model says of a continuation."""

    log_likelihood: float
    """The sum over its tokens, in nats; probabilities are over all rows of the head, as in training."""

    is_greedy: bool
    """Whether each token is the likeliest one after those before it."""


def batches(continuations: Sequence[Continuation], rows: int) -> Iterator[list[int]]:
    """Places of continuations that share a pass of the model, the longest first.

    Those that have the model read the same tokens, as the one-token answers to a question do, count as one row.
    """
    same: dict[tuple[int, ...], list[int]] = {}
    for place, continuation in enumerate(continuations):
        same.setdefault(continuation.read, []).append(place)
    longest_first = sorted(same, key=lambda read: (-len(read), read))
    for start in range(0, len(longest_first), rows):
        yield [place for read in longest_first[start : start + rows] for place in same[read]]


@torch.no_grad()
def score(model: Decoder, continuations: Sequence[Continuation], chunk_elements: int = 2**25) -> list[Score]:
    """Score continuations in one pass of the model.

    Rows are padded on the right, which nothing before it sees. Logits are made where a continuation stands and nowhere
    else, and a chunk at a time.

    Args:
        model: in evaluation mode.
        continuations: of any lengths; one without tokens scores 0 and is greedy.
        chunk_elements: logits held at once.
    """
    rows = {read: row for row, read in enumerate(dict.fromkeys(continuation.read for continuation in continuations))}
    device = model.embedding.weight.device
    longest = max(1, *map(len, rows))
    tokens_BT = torch.tensor([[*read, *[0] * (longest - len(read))] for read in rows], device=device)
    first = min(len(continuation.context) for continuation in continuations) - 1
    hidden_BWC = model.hidden(tokens_BT, wanted=longest - first)
    lengths = [len(continuation.tokens) for continuation in continuations]
    at_N = torch.tensor(
        [
            rows[continuation.read] * (longest - first) + len(continuation.context) - 1 - first + place
            for continuation in continuations
            for place in range(len(continuation.tokens))
        ],
        dtype=torch.long,
        device=device,
    )
    labels_N = torch.tensor(
        [token for continuation in continuations for token in continuation.tokens], dtype=torch.long, device=device
    )
    logp_N, greedy_N = _chosen(model, hidden_BWC.flatten(0, 1)[at_N], labels_N, chunk_elements)
    return [
        Score(float(logp.sum(dtype=torch.float64)), bool(greedy.all()))
        for logp, greedy in zip(logp_N.split(lengths), greedy_N.split(lengths), strict=True)
    ]


def _chosen(model: Decoder, x_NC: Tensor, labels_N: Tensor, chunk_elements: int) -> tuple[Tensor, Tensor]:
    """The log-probability of each label, and whether no real token is likelier; both (N,), on the CPU."""
    logp_N, greedy_N = [], []
    chunk = max(1, chunk_elements // model.config.padded_vocab_size)
    for x, labels in zip(x_NC.split(chunk), labels_N.split(chunk), strict=True):
        logits = model.head(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logp_N.append(logits.gather(1, labels[:, None])[:, 0] - logits.logsumexp(-1))
        greedy_N.append(logits[:, : model.config.vocab_size].argmax(-1) == labels)
    return torch.cat(logp_N).cpu(), torch.cat(greedy_N).cpu()
