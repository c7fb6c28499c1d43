"""Decoding as a compiled graph, by compact modules where the strategy has them: a tile is the whole history there."""

import torch
from torch._dynamo.utils import counters

from kvpath.testing.routes import LENGTH, continued, difference, logits, new_cache
from kvpath.testing.toys import Toy, tokens

PROMPT = 3


def decoding(toy: Toy) -> float:
    """Single tokens after a prefill, through torch's default compiler; infinite if it takes over two compilations."""
    return _decoding(toy, "inductor")


def traced_decoding(toy: Toy) -> float:
    """As `decoding`, but the graph that the compiler would get is run as it is: seconds instead of a minute."""
    return _decoding(toy, "aot_eager")


def _decoding(toy: Toy, backend: str) -> float:
    tokens_BT = tokens(2, LENGTH)
    expected = logits(toy.decoder(), tokens_BT)
    model = toy.decoder().eval()
    model.compact()
    cache = new_cache(model, 2)
    cache.reserve(LENGTH)
    continued(model, cache, tokens_BT[:, :PROMPT], [PROMPT])
    torch.compiler.reset()
    before = counters["stats"]["unique_graphs"]
    model._run = torch.compile(model._run, backend=backend)  # type: ignore[method-assign]
    found = continued(model, cache, tokens_BT[:, PROMPT:], [])
    compilations = counters["stats"]["unique_graphs"] - before
    torch.compiler.reset()
    return difference(found, expected[:, PROMPT:]) if compilations <= 2 else float("inf")
