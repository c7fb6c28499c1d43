"""What no comparison of routes can see, because a fault would be the same on all: checked against the layout itself."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvpath.attention.context import Context, Index
from kvpath.attention.layout import Layout, Slot
from kvpath.model.decoder import Decoder
from kvpath.testing.routes import difference, logits, worst
from kvpath.testing.toys import Toy, tokens

LENGTH = 7
Made = tuple[Tensor, ...]


@dataclass
class LayerCall:
    """What one layer's attention received and gave in a pass."""

    attention: nn.Module
    x_BTC: Tensor
    read: Made
    update: Tensor
    made: Made


def layers_alone(toy: Toy) -> float:
    """Each layer receives what the declared owner made, and gives the same when it is called alone, from the top down.

    A layer that takes anything by another way than its arguments gives something else.
    """
    model, context = toy.decoder(), fresh_context(toy)
    calls = layer_calls(model)
    differences = [0.0]
    for layer in reversed(range(len(calls))):
        call = calls[layer]
        for read, received in zip(model.layout.layers[layer].reads, call.read, strict=True):
            owner = calls[read.owner]
            names = list(model.layout.layers[read.owner].makes)
            declared = owner.made[names.index(read.name)][..., slice(*(read.columns or (None, None)))]
            differences.append(difference(received, declared))
        with torch.no_grad():
            update, made = call.attention(call.x_BTC, call.read, context.at(layer))
        pairs = zip((update, *made), (call.update, *call.made), strict=True)
        differences += [difference(found, expected) for found, expected in pairs]
    return worst(differences)


def dependences(toy: Toy) -> float:
    """How many pairs of tokens depend on each other against the layout, over all layers; by derivatives.

    A layer's output at token t must not depend on tokens after t, nor on entries that have left the window; it must
    depend on every entry that it reads or, where it reads none, on its own input within the smallest window.
    """
    calls, context = layer_calls(toy.decoder()), fresh_context(toy)
    wrong = 0
    for layer, call in enumerate(calls):
        sources = [part.detach().requires_grad_() for part in (call.x_BTC, *call.read)]
        update, _ = call.attention(sources[0], tuple(sources[1:]), context.at(layer))
        weights = torch.linspace(0.5, 1.5, update.shape[-1], dtype=update.dtype)
        for t in range(LENGTH):
            output = (update[0, t] * weights).sum()
            slopes = torch.autograd.grad(output, sources, retain_graph=True, allow_unused=True)
            for slope, (least, most) in zip(slopes, reaches(context.layout, layer), strict=True):
                for s in range(LENGTH):
                    depends = slope is not None and bool((slope[0, s] != 0).any())
                    forbidden = s > t or t - s >= most
                    # A single visible key takes all the weight, whatever it is.
                    required = t > 0 and least > 1 and 0 <= t - s < least
                    wrong += (depends and forbidden) or (required and not depends)
    return float(wrong)


def shifted(toy: Toy) -> float:
    """All positions moved on by the same number: rotary positions are relative.

    Something rotated on one side of the product only, or by another position than its own, gives something else.
    """
    model, tokens_BT = toy.decoder(), tokens(2, LENGTH)
    return difference(logits(model, tokens_BT, Index(torch.arange(5, 5 + LENGTH)[None])), logits(model, tokens_BT))


def fresh_context(toy: Toy) -> Context:
    """That of a pass without a cache over one row."""
    config = toy.config()
    return Context.of(config.layout(), Index.start(LENGTH), config.rope_base)


def layer_calls(model: Decoder) -> list[LayerCall]:
    """What every layer's attention received and gave in one pass without a cache."""
    calls: list[LayerCall] = []

    def keep(module: nn.Module, given: tuple[Tensor, Made, Context], out: tuple[Tensor, Made]) -> None:
        calls.append(LayerCall(module, given[0], given[1], out[0], out[1]))

    handles = [block.get_submodule("attention").register_forward_hook(keep) for block in model.blocks]
    logits(model, tokens(1, LENGTH))
    for handle in handles:
        handle.remove()
    return calls


def reaches(layout: Layout, layer: int) -> Iterator[tuple[int, int]]:
    """For the layer's own input, then for each of its reads: how many tokens back it must and may be seen."""
    entry = layout.layers[layer]
    own = [slot for slot in entry.makes.values() if slot.over == "history" and slot.formed_from is None]
    least, most = _reach(own)
    # What a layer makes beside what it reads may be for later layers alone; its queries come from the last token.
    yield (0 if entry.reads else least), max(1, most)
    for read in entry.reads:
        source = layout.slot(read.owner, read.name)
        formed = [slot for slot in entry.makes.values() if slot.formed_from == (read.owner, read.name)]
        yield _reach(formed if source.over == "new" else [source])


def _reach(slots: list[Slot]) -> tuple[int, int]:
    windows = [LENGTH if slot.window is None else slot.window for slot in slots]
    return min(windows, default=0), max(windows, default=0)
