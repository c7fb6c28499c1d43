"""What decodes, seen from who measures it: ours, or another implementation of the same model."""

from typing import Any, Protocol

from torch import Tensor

from kvpath.inference.cache import Cache
from kvpath.inference.generate import compiled_pass, one_pass
from kvpath.inference.workload import random_cache
from kvpath.model.decoder import Decoder


class Subject(Protocol):
    """A model with caches of its own kind."""

    def filled(self, context: int, batch: int, room: int) -> Any:
        """A cache of `context` tokens of random content in each row, with room for `room` of them."""
        ...

    def step(self, tokens_BT: Tensor, cache: Any) -> Tensor:
        """Logits (B, V) after the last of some more tokens."""
        ...

    def bytes_of(self, cache: Any) -> int:
        """What a cache has allocated."""
        ...


class Ours:
    """A model as `kvpath generate` runs it.

    Args:
        model: the decoder, by compact modules if it is compacted.
        compiled: whether single tokens go through a compiled graph.
    """

    def __init__(self, model: Decoder, compiled: bool = False) -> None:
        self.layout, self.dtype = model.layout, model.embedding.weight.dtype
        self._prefill = one_pass(model)
        self._decode = compiled_pass(model) if compiled else self._prefill

    def filled(self, context: int, batch: int, room: int) -> Cache:
        """As of a Subject."""
        return random_cache(self.layout, context, batch, room, self.dtype)

    def step(self, tokens_BT: Tensor, cache: Cache) -> Tensor:
        """As of a Subject."""
        run = self._decode if tokens_BT.shape[1] == 1 else self._prefill
        return run(tokens_BT, cache.place(tokens_BT), cache)

    def bytes_of(self, cache: Cache) -> int:
        """As of a Subject."""
        return cache.bytes_allocated
