"""Which positions each layer must compute and form in a prefill, derived from the layout."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvpath.attention.layout import Layout


@dataclass(frozen=True)
class PrefillPlan:
    """For a prompt of some length, counted from its end."""

    inputs: tuple[int, ...]
    """Positions of the residual stream that each layer receives."""

    computed: tuple[int, ...]
    """Positions whose output each layer computes: attention and MLP run on these."""

    formed: Mapping[tuple[int, str], int]
    """Positions at which each slot (owner, name) is formed."""

    received: Mapping[tuple[int, int, str], int]
    """Positions that a reader receives of a slot over the new tokens: (reader, owner, name)."""


def prefill_plan(layout: Layout, length: int, wanted: int) -> PrefillPlan:
    """The least that builds the complete cache for `length` new tokens and gives the last `wanted` outputs.

    From the top down: the last layer computes what is wanted; a slot is formed at
    min(length, max(window or length, computed by a reader + its window - 1)) positions over its readers; a slot over
    the new tokens where its readers form theirs from it; a layer's input is needed where it computes or forms.
    """
    n_layers = len(layout.layers)
    computed = [wanted] * n_layers
    inputs = [wanted] * n_layers
    formed: dict[tuple[int, str], int] = {}
    received: dict[tuple[int, int, str], int] = {}
    for layer in reversed(range(n_layers)):
        entry = layout.layers[layer]
        if layer + 1 < n_layers:
            computed[layer] = inputs[layer + 1]
        for name, slot in entry.makes.items():
            readers = layout.readers(layer, name)
            if slot.over == "new":
                count = max((received[reader, layer, name] for reader in readers), default=0)
            elif slot.window is None:
                count = length
            else:
                reach = max(computed[reader] for reader in (layer, *readers)) + slot.window - 1
                count = max(slot.window, reach)
            formed[layer, name] = min(length, count)
        own = [formed[layer, name] for name, slot in entry.makes.items() if slot.formed_from is None]
        inputs[layer] = min(length, max([computed[layer], *own]))
        for read in entry.reads:
            source = (read.owner, read.name)
            if layout.slot(*source).over == "new":
                uses = [formed[layer, name] for name, slot in entry.makes.items() if slot.formed_from == source]
                received[layer, *source] = max(uses, default=inputs[layer])
    return PrefillPlan(tuple(inputs), tuple(computed), formed, received)
