"""Grouped-query attention (Ainslie et al., 2023): each key/value head serves a group of query heads.

Multi-head attention is n_kv_heads = n_heads, multi-query attention is n_kv_heads = 1.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from kvpath.attention.compact import split
from kvpath.attention.context import Context
from kvpath.attention.layout import Heads, Slot
from kvpath.attention.product import Product, Segment, attend
from kvpath.attention.strategy import AttentionStrategy, Backbone, grouping_problems, rotary_problems, split_heads


@dataclass(kw_only=True)
class GQA(AttentionStrategy):
    """Every layer makes and stores its own keys and values."""

    n_kv_heads: int
    """Key/value heads; must divide n_heads."""

    head_dim: int
    """Features of each query, key and value head; all are rotated."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the fields."""
        yield from super().problems()
        yield from grouping_problems(self.n_heads, self.n_kv_heads)
        yield from rotary_problems("head_dim", self.head_dim)

    def makes(self, layer: int) -> Mapping[str, Slot]:
        """Keys, after rotation, and values."""
        return {"k": Slot(self.n_kv_heads, self.head_dim), "v": Slot(self.n_kv_heads, self.head_dim)}

    def heads(self, layer: int) -> Heads:
        """Full width everywhere."""
        return Heads(self.n_heads, self.head_dim, self.head_dim, rotary_dim=self.head_dim)

    def build(self, layer: int, backbone: Backbone) -> nn.Module:
        """The attention module of a layer."""
        return GroupedQueryAttention(self, backbone)

    def compact(self, layer: int, attentions: Sequence[nn.Module]) -> nn.Module | None:
        """The product of few queries by what reads a cache fastest."""
        return split(attentions[layer])


class GroupedQueryAttention(nn.Module):
    """q, k, v = W h; softmax(RoPE(q) RoPE(k)^T / sqrt(d)) v."""

    def __init__(self, strategy: GQA, backbone: Backbone) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = strategy.n_heads, strategy.n_kv_heads
        self.norm = backbone.norm(backbone.d_model)
        self.w_q = backbone.linear(backbone.d_model, strategy.n_heads * strategy.head_dim)
        self.w_k = backbone.linear(backbone.d_model, strategy.n_kv_heads * strategy.head_dim)
        self.w_v = backbone.linear(backbone.d_model, strategy.n_kv_heads * strategy.head_dim)
        self.w_o = strategy.output.build(strategy.n_heads * strategy.head_dim, backbone)

    def forward(
        self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context, product: Product = attend
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The update of the residual stream, and (k, v)."""
        h_BTC = self.norm(x_BTC)
        k = context.append("k", context.rotate(split_heads(self.w_k(h_BTC), self.n_kv_heads)))
        v = context.append("v", split_heads(self.w_v(h_BTC), self.n_kv_heads))
        q_BTHD = context.rotate(split_heads(self.w_q(context.computed(h_BTC)), self.n_heads))
        out = product([q_BTHD], [Segment(k=(k,), v=(v,))], context)
        return self.w_o(out), (k.values, v.values)
