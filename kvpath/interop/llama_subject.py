"""Hugging Face's Llama as something to be measured beside ours."""

import inspect
from typing import Any

import torch
from torch import Tensor

from kvpath.inference.workload import random_entries
from kvpath.interop.llama import llama_from
from kvpath.model.decoder import Decoder


class LlamaSubject:
    """transformers' Llama with the weights of a model; a `kvpath.inference.subject.Subject`.

    Args:
        model: ours.
        static: whether its cache is allocated whole, or grows with each token.
        compiled: whether single tokens go through a compiled graph.

    Raises:
        UserError: Llama cannot hold these weights.
    """

    def __init__(self, model: Decoder, static: bool, compiled: bool = False) -> None:
        self.layout, self.dtype, self.static = model.layout, model.embedding.weight.dtype, static
        self.vocab_size = model.config.vocab_size
        self.llama: Any = llama_from(model).eval()
        self._decode = torch.compile(self.llama, dynamic=True) if compiled else self.llama
        # What newer versions call it.
        parameters = inspect.signature(self.llama.forward).parameters
        self._keyword = "cache" if "cache" in parameters else "past_key_values"

    def filled(self, context: int, batch: int, room: int) -> Any:
        """As of a Subject; keys and values are those that ours get."""
        from transformers import DynamicCache, StaticCache

        config = self.llama.config
        cache = StaticCache(config=config, max_cache_len=room) if self.static else DynamicCache(config=config)
        entries = random_entries(self.layout, context, self.dtype)
        for layer in range(len(self.layout.layers) if context else 0):
            k, v = (entries[layer, name].transpose(1, 2).expand(batch, -1, -1, -1) for name in ("k", "v"))
            cache.update(k, v, layer)
        return cache

    def step(self, tokens_BT: Tensor, cache: Any) -> Tensor:
        """As of a Subject."""
        run = self._decode if tokens_BT.shape[1] == 1 else self.llama
        out = run(input_ids=tokens_BT, use_cache=True, logits_to_keep=1, **{self._keyword: cache})
        logits_BV: Tensor = out.logits[:, -1, : self.vocab_size]
        return logits_BV

    def bytes_of(self, cache: Any) -> int:
        """As of a Subject."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
