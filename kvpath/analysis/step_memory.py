"""What decoding holds beyond the model's weights and the cache: found by running it, on the meta device as a rule."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvpath.analysis.live_bytes import LiveBytes
from kvpath.attention.context import Context, History, Index
from kvpath.attention.layout import Layout, Slot
from kvpath.model.decoder import Decoder


def compact_bytes(model: Decoder) -> int:
    """Bytes of the weights that the strategy's compact modules derive and keep."""
    return sum(buffer.nbytes for module in _compact_modules(model) if module is not None for buffer in module.buffers())


@torch.no_grad()
def step_bytes(model: Decoder, context: int, *, compact: bool = True) -> int:
    """The most bytes that one layer's attention holds at once for itself, in a CPU's decoding step of one row.

    Inputs and results count, kernels' own workspaces do not; the fused attention product is one kernel on every device.
    Where something goes through `kvpath.attention.native`, which holds less, it is what torch alone would hold.

    Args:
        model: the model, in the dtype of the cache; on the meta device nothing is allocated.
        context: tokens stored, the new one included.
        compact: by compact modules where the strategy has them, not by plain ones.
    """
    config = model.config
    layout = config.attention.compact_layout(config) if compact else model.layout
    modules = _compact_modules(model) if compact else [None] * config.n_layers
    weight = model.embedding.weight
    store = _FilledStore(layout, context, weight.dtype, weight.device)
    x_BTC = torch.zeros(1, 1, config.d_model, dtype=weight.dtype, device=weight.device)
    peaks: dict[object, int] = {}
    for layer, (entry, module) in enumerate(zip(layout.layers, modules, strict=True)):
        read_slots = [layout.slot(read.owner, read.name) for read in entry.reads]
        kind = str((entry.makes, read_slots, [read.columns for read in entry.reads]))
        if kind not in peaks:
            attention = module or model.blocks[layer].get_submodule("attention")
            peaks[kind] = _peak(attention, x_BTC, layout, layer, store, config.rope_base)
    return max(peaks.values())


def _compact_modules(model: Decoder) -> list[nn.Module | None]:
    attentions = [block.get_submodule("attention") for block in model.blocks]
    return [model.config.attention.compact(layer, attentions) for layer in range(model.config.n_layers)]


def _peak(
    attention: Callable[..., object], x_BTC: Tensor, layout: Layout, layer: int, store: "_FilledStore", base: float
) -> int:
    read = tuple(
        values if key.columns is None else values[..., slice(*key.columns)]
        for key in layout.layers[layer].reads
        for values in [store.values(key.owner, key.name)]
    )
    context = Context.of(layout, store.new, base, store).at(layer)
    with FusedAttention(), LiveBytes() as live:
        attention(x_BTC, read, context)
    return live.peak


class _FilledStore:
    """A store that holds all of its tokens already."""

    def __init__(self, layout: Layout, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout, self.tokens = layout, tokens
        self.full = Index(torch.arange(tokens, device=device)[None], plain=True)
        self.new = self.full.part(slice(tokens - 1, tokens))
        self.memory = {
            (layer, name): torch.zeros(1, slot.heads, self.kept(slot), slot.dim, dtype=dtype, device=device)
            for layer, name, slot in layout.slots()
        }

    def kept(self, slot: Slot) -> int:
        return 1 if slot.over == "new" else min(self.tokens, slot.window or self.tokens)

    def values(self, layer: int, name: str) -> Tensor:
        return self.memory[layer, name].transpose(1, 2)

    def begin(self, new: Index) -> None:
        pass

    def advance(self) -> None:
        pass

    def place(self, tokens: Tensor) -> Index:
        return self.new

    def append(self, layer: int, name: str, new: Tensor) -> History:
        self.memory[layer, name][:, :, -1:] = new.transpose(1, 2)
        return History(self.values(layer, name), self.index(layer, name), self.layout.slot(layer, name).window)

    def index(self, layer: int, name: str) -> Index:
        kept = self.kept(self.layout.slot(layer, name))
        return self.full if kept == self.tokens else self.full.part(slice(self.tokens - kept, self.tokens))

    def full_index(self) -> Index:
        return self.full


class FusedAttention(TorchFunctionMode):
    """Takes the attention product for one kernel, which it is not on the meta device."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            query, _, value = args
            return query.new_zeros(*query.shape[:-1], value.shape[-1])
        return func(*args, **(kwargs or {}))
