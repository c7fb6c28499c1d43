"""Decoding as a compiled graph."""

import torch

from kvpath.model.decoder import Decoder
from kvpath.testing.routes import LENGTH, compacted, continued, difference, logits, new_cache
from kvpath.testing.toys import Toy, tokens


def decoding(toy: Toy) -> float:
    """Single tokens through torch's default compiler: infinite if that takes more than two compilations."""
    return _decoding(toy, "inductor")


def traced_decoding(toy: Toy) -> float:
    """As `decoding`, with the graph that the compiler would get, run as it is: seconds instead of a minute."""
    return _decoding(toy, "aot_eager")


def _decoding(toy: Toy, backend: str) -> float:
    tokens_BT = tokens(2, LENGTH)
    expected = logits(toy.decoder(), tokens_BT)
    model = compacted(toy.decoder())
    cache = new_cache(model, 2)
    cache.reserve(LENGTH)
    continued(model, cache, tokens_BT[:, :3], [3])
    torch.compiler.reset()
    compile_layers(model, backend)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=False):
        found = continued(model, cache, tokens_BT[:, 3:], [])
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.compiler.reset()
    return difference(found, expected[:, 3:]) if count <= 2 else float("inf")


def compile_layers(model: Decoder, backend: str) -> None:
    """As `Decoder.compile_layers`, by a compiler of choice."""
    model._run = torch.compile(model._run, backend=backend)  # type: ignore[method-assign]
