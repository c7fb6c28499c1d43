"""Passes of a given size, for measuring: a cache of random content, and the least that a pass has to do."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kvpath.analysis.allocation import kept_tokens
from kvpath.analysis.audit import count_parameters, decode_flops, on_meta
from kvpath.analysis.step_memory import FusedAttention
from kvpath.attention.accounting import read_elements, visible_pairs
from kvpath.attention.context import Index
from kvpath.attention.layout import Layout
from kvpath.attention.prefill import prefill_plan
from kvpath.inference.cache import Cache
from kvpath.model.config import BackboneConfig
from kvpath.model.decoder import Decoder


@dataclass(frozen=True)
class Work:
    """What a pass cannot do without."""

    bytes: int
    """To be read: each weight once, the embedding left out, and what attention must touch of the cache."""

    flops: int
    """Of matrix products, as `kvpath audit` counts them."""

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The least time, if reading and computing overlap perfectly."""
        return max(self.bytes / bytes_per_s, self.flops / flops_per_s)


def decoding_work(config: BackboneConfig, context: int, batch: int, dtype: torch.dtype) -> Work:
    """One new token in each of `batch` rows, which sees `context` tokens, itself included."""
    model = on_meta(config)
    read = batch * read_elements(model.layout, context) * context
    return Work(round((_weights_met(model) + read) * dtype.itemsize), batch * decode_flops(model, context))


@torch.no_grad()
def prefill_work(config: BackboneConfig, earlier: int, new: int, dtype: torch.dtype) -> Work:
    """`new` tokens (two or more) after `earlier` ones in one row, with logits for the last alone.

    States and latents are expanded once in each layer; layers compute no more positions than the cache and the logits
    need.
    """
    model, total = on_meta(config).to(dtype), earlier + new
    cache = random_cache(model.layout, earlier, 1, total, dtype, "meta")
    with FusedAttention(), FlopCounterMode(display=False) as counter:
        model(torch.empty(1, new, dtype=torch.int64, device="meta"), store=cache, wanted=1)
    plan = prefill_plan(model.layout, new, wanted=1)
    products = sum(
        entry.heads.flops_per_key
        * (visible_pairs(model.layout, layer, total) - visible_pairs(model.layout, layer, total - plan.computed[layer]))
        for layer, entry in enumerate(model.layout.layers)
    )
    read = read_elements(model.layout, earlier) * earlier if earlier else 0
    return Work(round((_weights_met(model) + read) * dtype.itemsize), counter.get_total_flops() + products)


def random_cache(
    layout: Layout, context: int, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Cache:
    """A cache that has passed over `context` tokens, filled with `random_entries`, the same in all rows.

    Raises:
        UserError: there is no memory for it.
    """
    cache = Cache(layout, batch, capacity, dtype=dtype, device=device)
    if context:
        cache.restore(Index.start(context, device), random_entries(layout, context, dtype, device))
    return cache


def random_entries(
    layout: Layout, context: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[tuple[int, str], Tensor]:
    """Entries (1, S, heads, dim) of every cached slot, by layer and name, always the same for the same layout.

    They are normal numbers, and views of one tensor, each from the next element on: no two are equal.
    """
    slots = {(layer, name): slot for layer, name, slot in layout.cached()}
    most = context * max(slot.elements for slot in slots.values())
    numbers = torch.randn(most + len(slots), generator=torch.Generator().manual_seed(0)).to(device, dtype)
    entries = {}
    for offset, (key, slot) in enumerate(slots.items()):
        shape = (1, kept_tokens(slot, context), slot.heads, slot.dim)
        entries[key] = numbers[offset : offset + math.prod(shape)].view(shape)
    return entries


def _weights_met(model: Decoder) -> int:
    """Elements of the weights that every pass reads: of an embedding that is no head, only some rows."""
    looked_up = 0 if model.config.tied_embeddings else model.embedding.weight.numel()
    return count_parameters(model) - looked_up
