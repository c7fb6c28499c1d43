"""KVPath-Rolling (KVPath, abstract): each layer of a path overwrites the next few features of the state before it.

A path has one buffer a head, to which its first layer writes d features and each later one appends d_delta: layer l
sees the d features from l * d_delta on. The buffer is stored pair by pair, after rotation, so what a layer sees is
one range of columns; its pair p stands for the pair p mod d / 2 of the state.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from kvpath.attention.compact import split
from kvpath.attention.context import Context
from kvpath.attention.layout import Heads, Read, Slot
from kvpath.attention.path import PathStrategy
from kvpath.attention.product import Product, Segment, attend
from kvpath.attention.strategy import Backbone, grouping_problems, rotary_problems, split_heads


@dataclass(kw_only=True)
class KVPathRolling(PathStrategy):
    """A path's first layer makes the whole state, alpha; layer l >= 1 overwrites d_delta features of it.

    These are the rotary pairs (l - 1) d_delta / 2 to l d_delta / 2 - 1, modulo d / 2, of keys and values alike.
    Stored per path and KV head: 2 d + 2 (m - 1) d_delta elements.
    """

    n_kv_heads: int
    """Key/value heads; must divide n_heads."""

    head_dim: int
    """Features of each head (d); all are rotated."""

    delta_dim: int
    """Features of each head that every later layer overwrites (d_delta); even, and smaller than head_dim."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the fields."""
        yield from super().problems()
        yield from grouping_problems(self.n_heads, self.n_kv_heads)
        yield from rotary_problems("head_dim", self.head_dim)
        yield from rotary_problems("delta_dim", self.delta_dim)
        if not 0 < self.delta_dim < self.head_dim:
            yield f"delta_dim must be between 1 and head_dim - 1 = {self.head_dim - 1}, got {self.delta_dim}"

    def seen_from(self, layer: int) -> int:
        """The first feature of its path's buffer that `layer` sees."""
        return (layer - self.path_start(layer)) * self.delta_dim

    def makes(self, layer: int) -> Mapping[str, Slot]:
        """The whole state in the first layer of a path, what is overwritten in the others; pair by pair, rotated."""
        if self.starts_path(layer):
            return {"k_alpha": Slot(self.n_kv_heads, self.head_dim), "v_alpha": Slot(self.n_kv_heads, self.head_dim)}
        return {"k_delta": Slot(self.n_kv_heads, self.delta_dim), "v_delta": Slot(self.n_kv_heads, self.delta_dim)}

    def reads(self, layer: int) -> tuple[Read, ...]:
        """Of each earlier layer of the path, a key and a value: the columns that were not overwritten since."""
        found: list[Read] = []
        for owner in range(self.path_start(layer), layer):
            for name, slot in self.makes(owner).items():
                written_from = self.seen_from(owner) + self.head_dim - slot.dim
                columns = (max(0, self.seen_from(layer) - written_from), slot.dim)
                if columns[0] < columns[1]:
                    found.append(Read(owner, name, columns))
        return tuple(found)

    def heads(self, layer: int) -> Heads:
        """Full width everywhere."""
        return Heads(self.n_heads, self.head_dim, self.head_dim, rotary_dim=self.head_dim)

    def build(self, layer: int, backbone: Backbone) -> nn.Module:
        """The attention module of a layer."""
        return RollingAttention(self, layer, backbone)

    def compact(self, layer: int, attentions: Sequence[nn.Module]) -> nn.Module | None:
        """Scores and sums over each layer's columns apart: strided views of what is stored."""
        return split(attentions[layer])


class RollingAttention(nn.Module):
    """softmax(RoPE(q) k^T / sqrt(d)) v over the features of the path's buffer that the layer sees."""

    def __init__(self, strategy: KVPathRolling, layer: int, backbone: Backbone) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = strategy.n_heads, strategy.n_kv_heads, strategy.head_dim
        self.k_name, self.v_name = strategy.makes(layer)
        width = strategy.makes(layer)[self.k_name].dim
        self.seen_from = strategy.seen_from(layer)
        self.first_pair = (self.seen_from + self.head_dim - width) // 2
        self.norm = backbone.norm(backbone.d_model)
        self.w_q = backbone.linear(backbone.d_model, strategy.n_heads * strategy.head_dim)
        self.w_kv = backbone.linear(backbone.d_model, 2 * strategy.n_kv_heads * width)
        self.w_o = strategy.output.build(strategy.n_heads * strategy.head_dim, backbone)

    def forward(
        self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context, product: Product = attend
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The update of the residual stream, and (k_alpha, v_alpha) or (k_delta, v_delta)."""
        h_BTC = self.norm(x_BTC)
        k_new, v_new = split_heads(self.w_kv(h_BTC), 2 * self.n_kv_heads).chunk(2, dim=2)
        k_new = context.rotate_pairs(k_new, self.head_dim, self.first_pair)
        k = context.append(self.k_name, by_pairs(k_new))
        v = context.append(self.v_name, by_pairs(v_new))
        earlier = context.received(read)
        segment = Segment(k=(*earlier[::2], k), v=(*earlier[1::2], v))

        q_BTHD = context.rotate(split_heads(self.w_q(context.computed(h_BTC)), self.n_heads))
        out = product([by_pairs(q_BTHD).roll(-self.seen_from, dims=-1)], [segment], context)
        out_BTHD = by_halves(split_heads(out, self.n_heads).roll(self.seen_from, dims=-1))
        return self.w_o(out_BTHD.flatten(2)), (k.values, v.values)


def by_pairs(x: Tensor) -> Tensor:
    """Features (0, D/2), (1, D/2 + 1), ... side by side, from the Llama family's order."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def by_halves(x: Tensor) -> Tensor:
    """The inverse of `by_pairs`."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
