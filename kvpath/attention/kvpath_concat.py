"""KVPath-Concat (KVPath, eqs. 2 to 5 and 10): one alpha per path, one delta per layer, concatenated."""

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
class KVPathConcat(PathStrategy):
    """Keys and values are [alpha || delta]: alpha is made by a path's first layer, delta by every layer.

    Stored per path and KV head: 2 d_alpha + 2 m d_delta elements (eq. 5). Only deltas are rotated.
    """

    n_kv_heads: int
    """Key/value heads; must divide n_heads."""

    head_dim: int
    """Features of each head, alpha and delta together (d)."""

    delta_dim: int
    """Features of each head that every layer makes for itself (d_delta); smaller than head_dim."""

    @property
    def alpha_dim(self) -> int:
        """Features of each head that a path shares (d_alpha)."""
        return self.head_dim - self.delta_dim

    def problems(self) -> Iterator[str]:
        """What is wrong with the fields."""
        yield from super().problems()
        yield from grouping_problems(self.n_heads, self.n_kv_heads)
        yield from rotary_problems("delta_dim", self.delta_dim)
        if not 0 < self.delta_dim < self.head_dim:
            yield f"delta_dim must be between 1 and head_dim - 1 = {self.head_dim - 1}, got {self.delta_dim}"

    def makes(self, layer: int) -> Mapping[str, Slot]:
        """Deltas in every layer; before them alphas in the first layer of a path."""
        alpha, delta = Slot(self.n_kv_heads, self.alpha_dim), Slot(self.n_kv_heads, self.delta_dim)
        first = {"k_alpha": alpha, "v_alpha": alpha} if self.starts_path(layer) else {}
        return {**first, "k_delta": delta, "v_delta": delta}

    def reads(self, layer: int) -> tuple[Read, ...]:
        """The alphas of the path."""
        start = self.path_start(layer)
        return () if layer == start else (Read(start, "k_alpha"), Read(start, "v_alpha"))

    def heads(self, layer: int) -> Heads:
        """Full width, of which the delta is rotated."""
        return Heads(self.n_heads, self.head_dim, self.head_dim, rotary_dim=self.delta_dim)

    def build(self, layer: int, backbone: Backbone) -> nn.Module:
        """The attention module of a layer."""
        return ConcatAttention(self, backbone, makes_alpha=self.starts_path(layer))

    def compact(self, layer: int, attentions: Sequence[nn.Module]) -> nn.Module | None:
        """Scores and sums over alpha and delta apart."""
        return split(attentions[layer])


class ConcatAttention(nn.Module):
    """q = [q_alpha || RoPE(q_delta)], k = [k_alpha || RoPE(k_delta)], v = [v_alpha || v_delta] (eq. 10)."""

    def __init__(self, strategy: KVPathConcat, backbone: Backbone, makes_alpha: bool) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = strategy.n_heads, strategy.n_kv_heads
        self.dims = (strategy.alpha_dim, strategy.delta_dim)
        self.norm = backbone.norm(backbone.d_model)
        self.w_q = backbone.linear(backbone.d_model, strategy.n_heads * strategy.head_dim)
        if makes_alpha:
            self.w_alpha = backbone.linear(backbone.d_model, 2 * strategy.n_kv_heads * strategy.alpha_dim)
        self.makes_alpha = makes_alpha
        self.w_delta = backbone.linear(backbone.d_model, 2 * strategy.n_kv_heads * strategy.delta_dim)
        self.w_o = strategy.output.build(strategy.n_heads * strategy.head_dim, backbone)

    def forward(
        self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context, product: Product = attend
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The update of the residual stream, and (k_alpha, v_alpha in a path's first layer,) k_delta, v_delta."""
        h_BTC = self.norm(x_BTC)
        if self.makes_alpha:
            k, v = split_heads(self.w_alpha(h_BTC), 2 * self.n_kv_heads).chunk(2, dim=2)
            k_alpha, v_alpha = context.append("k_alpha", k), context.append("v_alpha", v)
        else:
            k_alpha, v_alpha = context.received(read)
        k, v = split_heads(self.w_delta(h_BTC), 2 * self.n_kv_heads).chunk(2, dim=2)
        k_delta, v_delta = context.append("k_delta", context.rotate(k)), context.append("v_delta", v)

        q_BTHD = split_heads(self.w_q(context.computed(h_BTC)), self.n_heads)
        q_alpha, q_delta = q_BTHD.split(self.dims, dim=-1)
        segment = Segment(k=(k_alpha, k_delta), v=(v_alpha, v_delta))
        out = product([q_alpha, context.rotate(q_delta)], [segment], context)
        alphas = (k_alpha.values, v_alpha.values) if self.makes_alpha else ()
        return self.w_o(out), (*alphas, k_delta.values, v_delta.values)
