"""What a layout costs: elements stored and read per token, and FLOPs.

A multiply-add is 2 FLOPs, and only matrix products count. Linear layers are counted from the modules, attention
products from the layout, so neither can drift from what runs.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from kvpath.attention.context import Context, Index
from kvpath.attention.layout import Layout


def per_token(total: int, tokens: int) -> float:
    """A total over tokens: an int where it is one, so that exact counts print and compare as such."""
    return total / tokens if total % tokens else total // tokens


def stored_elements(layout: Layout, context: int | None = None) -> float:
    """Elements that a cache stores per token of context.

    Args:
        layout: the layout.
        context: tokens in the cache, over which windows are averaged; None where every window is still filling.
    """
    length = context or 1
    total = sum(slot.elements * _kept(slot.window, length) for _, _, slot in layout.cached())
    return per_token(total, length)


def read_elements(layout: Layout, context: int | None = None) -> float:
    """Elements that one decoding step reads per token of context, the arguments as in `stored_elements`.

    Each layer counts every stored element that its attention must touch once: an owner that four layers read counts
    four times, a latent that serves keys and values once.
    """
    length = context or 1
    total = 0
    for layer in range(len(layout.layers)):
        for (owner, name), columns in layout.touched(layer).items():
            slot = layout.slot(owner, name)
            total += slot.heads * len(columns) * _kept(slot.window, length)
    return per_token(total, length)


def key_windows(layout: Layout, layer: int) -> tuple[int | None, ...]:
    """The window of each range of keys that stands in the softmax of `layer`; None for one that sees all tokens.

    All parts over features share their window, so the histories that a layer makes or reads form one range for each
    distinct window among them.
    """
    entry = layout.layers[layer]
    slots = [*entry.makes.values(), *(layout.slot(read.owner, read.name) for read in entry.reads)]
    return tuple(dict.fromkeys(slot.window for slot in slots if slot.cached or slot.over == "history"))


def visible_keys(layout: Layout, layer: int, context: int) -> int:
    """The keys that one query at the end of `context` tokens sees, itself included, over all ranges of keys."""
    return sum(_kept(window, context) for window in key_windows(layout, layer))


def visible_pairs(layout: Layout, layer: int, seq_len: int, causal: bool = True) -> int:
    """The keys that the queries of a whole sequence see: (T + 1) / 2 on average if causal, fewer in windows.

    Without the causal discount all T of every range count, as kernels that do not skip what is masked compute them.
    """
    windows = key_windows(layout, layer)
    if not causal:
        return len(windows) * seq_len**2
    growing = [_kept(window, seq_len) for window in windows]
    return sum(count * (count + 1) // 2 + (seq_len - count) * count for count in growing)


@runtime_checkable
class StatesFlops(Protocol):
    """A module with matrices outside of linear layers that says what it costs, its children included."""

    def matmul_flops_per_token(self) -> int:
        """FLOPs of its matrix products for one token, the attention product left out; a multiply-add is 2."""
        ...


def stated_flops(module: nn.Module) -> int | None:
    """FLOPs per token of a module's matrix products, each linear layer once; None if a matrix is unaccounted for."""
    if isinstance(module, StatesFlops):
        return module.matmul_flops_per_token()
    if isinstance(module, nn.Linear):
        return 2 * module.in_features * module.out_features
    if isinstance(module, nn.Embedding):
        return 0
    if any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):
        return None
    total = 0
    for child in module.children():
        flops = stated_flops(child)
        if flops is None:
            return None
        total += flops
    return total


def measured_flops(run: Callable[[int], object]) -> int:
    """The part of a computation's FLOPs that grows with its tokens, per token, as torch counts them.

    An attention product grows with their square and drops out, however it is written.

    Args:
        run: does the computation on so many tokens; on the meta device, where nothing is computed.
    """

    def rate(tokens: int) -> float:
        with FlopCounterMode(display=False) as counter:
            run(tokens)
        return counter.get_total_flops() / tokens

    return round(2 * rate(16) - rate(32))


def attention_flops(module: nn.Module, layout: Layout, layer: int, d_model: int) -> int:
    """FLOPs per token of an attention module on the meta device, without the product itself.

    Stated by its linear layers and statements, measured if a matrix is in neither: never counted as zero.
    """
    stated = stated_flops(module)
    if stated is not None:
        return stated

    def run(tokens: int) -> None:
        context = Context.of(layout, Index.start(tokens, "meta"), rotary_base=1e4).at(layer)
        read = tuple(_entries(layout, entry.owner, entry.name, tokens) for entry in layout.layers[layer].reads)
        module(torch.empty(1, tokens, d_model, device="meta"), read, context)

    return measured_flops(run)


def _entries(layout: Layout, owner: int, name: str, tokens: int) -> Tensor:
    slot = layout.slot(owner, name)
    return torch.empty(1, tokens, slot.heads, slot.dim, device="meta")


def _kept(window: int | None, length: int) -> int:
    return length if window is None else min(window, length)
