"""Cross-layer attention (Brandon et al., 2024): some layers make keys and values, the others read them whole."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from kvpath.attention.context import Context
from kvpath.attention.gqa import GQA
from kvpath.attention.layout import Layout, Read, Slot
from kvpath.attention.product import Product, Segment, attend
from kvpath.attention.strategy import Backbone, split_heads
from kvpath.errors import UserError


@dataclass(kw_only=True)
class CLA(GQA):
    """As GQA, but only owners make and store keys and values; set either group_size or owners.

    >>> CLA(n_heads=8, n_kv_heads=4, head_dim=64, group_size=2).reads(3)
    (Read(owner=2, name='k', columns=None), Read(owner=2, name='v', columns=None))
    """

    group_size: int | None = None
    """Consecutive layers that share the keys and values of the first of them; the last group may be smaller."""

    owners: list[int] | None = None
    """Any other plan: for each layer, the layer whose keys and values it reads; itself if it makes its own."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the fields."""
        yield from super().problems()
        if (self.group_size is None) == (self.owners is None):
            yield f"set group_size or owners, and not both, got group_size={self.group_size}, owners={self.owners}"
        if self.group_size is not None and self.group_size < 1:
            yield f"group_size must be positive, got {self.group_size}"
        for layer, owner in enumerate(self.owners or []):
            where = f"owners[{layer}] = {owner}"
            if not 0 <= owner <= layer:
                yield f"{where}: an owner must be the layer itself or come before it, so be in 0 to {layer}"
            elif self.owners is not None and self.owners[owner] != owner:
                yield f"{where}: layer {owner} makes nothing to read, since owners[{owner}] = {self.owners[owner]}"

    def owner(self, layer: int) -> int:
        """The layer whose keys and values `layer` reads; itself if it makes its own."""
        if self.owners is not None:
            return self.owners[layer]
        assert self.group_size is not None
        return layer - layer % self.group_size

    def makes(self, layer: int) -> Mapping[str, Slot]:
        """Keys, after rotation, and values, in owners; nothing elsewhere."""
        return super().makes(layer) if self.owner(layer) == layer else {}

    def reads(self, layer: int) -> tuple[Read, ...]:
        """The keys and values of the layer's owner."""
        owner = self.owner(layer)
        return () if owner == layer else (Read(owner, "k"), Read(owner, "v"))

    def build(self, layer: int, backbone: Backbone) -> nn.Module:
        """The attention module of a layer: an owner's is that of GQA."""
        return super().build(layer, backbone) if self.owner(layer) == layer else ReadingAttention(self, backbone)

    def layout(self, backbone: Backbone) -> Layout:
        """The layout over all layers, checked.

        Raises:
            UserError: owners does not name one owner for each layer of the model.
        """
        if self.owners is not None and len(self.owners) != backbone.n_layers:
            raise UserError(f"owners must have n_layers={backbone.n_layers} entries, got {len(self.owners)}")
        return super().layout(backbone)


class ReadingAttention(nn.Module):
    """q = W h; softmax(RoPE(q) K^T / sqrt(d)) V over the owner's keys and values."""

    def __init__(self, strategy: CLA, backbone: Backbone) -> None:
        super().__init__()
        self.n_heads = strategy.n_heads
        self.norm = backbone.norm(backbone.d_model)
        self.w_q = backbone.linear(backbone.d_model, strategy.n_heads * strategy.head_dim)
        self.w_o = strategy.output.build(strategy.n_heads * strategy.head_dim, backbone)

    def forward(
        self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context, product: Product = attend
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The update of the residual stream, and nothing made."""
        k, v = context.received(read)
        q_BTHD = context.rotate(split_heads(self.w_q(self.norm(context.computed(x_BTC))), self.n_heads))
        return self.w_o(product([q_BTHD], [Segment(k=(k,), v=(v,))], context)), ()
