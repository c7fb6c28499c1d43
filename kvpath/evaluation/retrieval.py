"""Recall: whether the likeliest token is the one that is asked for, by a plain pass or from the cache."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torchmetrics import Metric

from kvpath.model.batch import Batch
from kvpath.model.decoder import Decoder
from kvpath.model.loss import IGNORE


class Accuracy(Metric):
    """Counts answers, over all ranks.

    Args:
        whole: an answer is a sequence, right only if all its labels are; otherwise each label is one.
        through_cache: how the answers are found; see `answers_right`.
    """

    full_state_update = False
    correct: Tensor
    asked: Tensor

    def __init__(self, whole: bool = False, through_cache: bool = False) -> None:
        super().__init__()
        self.whole, self.through_cache = whole, through_cache
        self.add_state("correct", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("asked", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = ()) -> Self:
        """Moves to devices and keeps its own dtypes."""
        super()._apply(lambda tensor: tensor.to(fn(tensor).device), exclude_state)
        return self

    def read(self, model: Decoder, batch: Batch) -> None:
        """Count what is answered as labelled; tokens and labels are (B, C)."""
        self.update(*answers_right(model, batch["tokens"], batch["labels"], self.through_cache))

    def update(self, right_BC: Tensor, asked_BC: Tensor) -> None:
        """Add which labels were found, and which there are."""
        if self.whole:
            right_BC, asked_BC = (right_BC | ~asked_BC).all(1) & asked_BC.any(1), asked_BC.any(1)
        self.correct += right_BC.sum()
        self.asked += asked_BC.sum()

    def compute(self) -> dict[str, Tensor]:
        """`correct` and `asked`, summed over batches and ranks."""
        return {"correct": self.correct, "asked": self.asked}

    def result(self, known: Any) -> dict[str, Any] | None:
        """What it comes to, None if nothing was asked; every rank must call it.

        Args:
            known: what the data says of what was asked; nothing of it is needed.
        """
        sums = self.compute()
        correct, asked = int(sums["correct"]), int(sums["asked"])
        return {"correct": correct, "asked": asked, "accuracy": correct / asked} if asked else None


@torch.no_grad()
def answers_right(
    model: Decoder, tokens_BC: Tensor, labels_BC: Tensor, through_cache: bool = False
) -> tuple[Tensor, Tensor]:
    """Where the likeliest token of the vocabulary is the label, and where there is one, (B, C) bool each.

    Args:
        model: the decoder, in eval mode.
        tokens_BC: what it reads, the answers before the last of an answer of several tokens included: it gives the
            whole exactly if it would have found it token by token.
        labels_BC: what is to be found, IGNORE where nothing is.
        through_cache: read all up to the first label of the batch at once, then a token at a time with a cache, as in
            generation; otherwise all in one pass without one.
    """
    asked_BC = labels_BC != IGNORE
    right_BC = torch.zeros_like(asked_BC)
    if through_cache:
        for place, chosen_B in _from_cache(model, tokens_BC, asked_BC.any(0)):
            right_BC[:, place] = (chosen_B == labels_BC[:, place]) & asked_BC[:, place]
        return right_BC, asked_BC
    hidden_BCW = model.hidden(tokens_BC)
    logits_NV = model.head(hidden_BCW[asked_BC])[:, : model.config.vocab_size]
    right_BC[asked_BC] = logits_NV.argmax(-1) == labels_BC[asked_BC]
    return right_BC, asked_BC


def as_in_generation(model: Decoder) -> None:
    """Have the strategy's compact modules until the model is told to expand."""
    # what is made in inference mode could never be trained again
    with torch.inference_mode(False), torch.no_grad():
        model.compact()


def task_name(entry: Mapping[str, Any]) -> str:
    """What a result calls its task, with its number of keys or its depth."""
    depth, n_keys = entry.get("depth"), entry.get("n_keys")
    return f"{entry['task']}{f' n_keys={n_keys}' if n_keys is not None else ''}" + (
        f" depth={depth:g}" if depth is not None else ""
    )


def _from_cache(model: Decoder, tokens_BC: Tensor, asked_C: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The likeliest token of each row, (B,), at each place that is asked about in any."""
    from kvpath.inference.cache import Cache
    from kvpath.inference.generate import computes_in, one_pass

    places = asked_C.nonzero().flatten().tolist()  # in their order
    if not places:
        return
    step, dtype = one_pass(model), computes_in(model.embedding.weight)
    cache = Cache(model.layout, len(tokens_BC), places[-1] + 1, dtype=dtype, device=tokens_BC.device)
    begin = 0
    for place in range(places[0], places[-1] + 1):
        read_BT = tokens_BC[:, begin : place + 1]
        logits_BV = step(read_BT, cache.place(read_BT), cache)
        if place in places:
            yield place, logits_BV.argmax(-1)
        begin = place + 1
