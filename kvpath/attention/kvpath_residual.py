"""KVPath-Residual (KVPath, eqs. 6 to 9): each layer adds an expanded low-dimensional delta to the state before it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from kvpath.attention.context import Context
from kvpath.attention.layout import Heads, Layout, Read, Slot
from kvpath.attention.path import PathStrategy
from kvpath.attention.per_head import PerHeadLinear
from kvpath.attention.product import Segment, attend
from kvpath.attention.strategy import Backbone, grouping_problems, rotary_problems, split_heads


@dataclass(kw_only=True)
class KVPathResidual(PathStrategy):
    """A path's first layer makes the whole state, alpha; each later layer adds U delta to it.

    Stored per path and KV head: 2 d + 2 (m - 1) d_delta elements (eq. 9), all before rotation; the states of later
    layers are rebuilt from them in every pass, and rotated over their full width.
    """

    n_kv_heads: int
    """Key/value heads; must divide n_heads."""

    head_dim: int
    """Features of each head (d); all are rotated."""

    delta_dim: int
    """Features of each head's update (d_delta); smaller than head_dim."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the fields."""
        yield from super().problems()
        yield from grouping_problems(self.n_heads, self.n_kv_heads)
        yield from rotary_problems("head_dim", self.head_dim)
        if not 0 < self.delta_dim < self.head_dim:
            yield f"delta_dim must be between 1 and head_dim - 1 = {self.head_dim - 1}, got {self.delta_dim}"

    def makes(self, layer: int) -> Mapping[str, Slot]:
        """Alphas in the first layer of a path, deltas in the others; between these, the rebuilt state is passed on."""
        full = Slot(self.n_kv_heads, self.head_dim)
        if self.starts_path(layer):
            return {"k_alpha": full, "v_alpha": full}
        delta, state = Slot(self.n_kv_heads, self.delta_dim), replace(full, cached=False)
        passed_on = {} if self.starts_path(layer + 1) else {"k": state, "v": state}
        return {"k_delta": delta, "v_delta": delta, **passed_on}

    def reads(self, layer: int) -> tuple[Read, ...]:
        """The state of the layer before."""
        if self.starts_path(layer):
            return ()
        names = ("k_alpha", "v_alpha") if self.starts_path(layer - 1) else ("k", "v")
        return tuple(Read(layer - 1, name) for name in names)

    def heads(self, layer: int) -> Heads:
        """Full width everywhere."""
        return Heads(self.n_heads, self.head_dim, self.head_dim, rotary_dim=self.head_dim)

    def layout(self, backbone: Backbone) -> Layout:
        """The layout over all layers, checked; where the model ends within a path, its last layer passes nothing on."""
        *lower, last = super().layout(backbone).layers
        stored = {name: slot for name, slot in last.makes.items() if slot.cached}
        return Layout((*lower, replace(last, makes=stored)))

    def decode_flops(self, layer: int, n_keys: int) -> int:
        """Beside the product, the states of all earlier tokens are rebuilt: U_K k_delta and U_V v_delta for each."""
        rebuilt = 0 if self.starts_path(layer) else n_keys - 1
        per_key = 4 * self.n_kv_heads * self.delta_dim * self.head_dim
        return super().decode_flops(layer, n_keys) + per_key * rebuilt

    def build(self, layer: int, backbone: Backbone) -> nn.Module:
        """The attention module of a layer."""
        passes_on = "k" in self.layout(backbone).layers[layer].makes
        return ResidualAttention(self, backbone, makes_alpha=self.starts_path(layer), passes_on=passes_on)


class ResidualAttention(nn.Module):
    """k = k_before + U_K k_delta, v = v_before + U_V v_delta; softmax(RoPE(q) RoPE(k)^T / sqrt(d)) v (eqs. 7, 11)."""

    def __init__(self, strategy: KVPathResidual, backbone: Backbone, makes_alpha: bool, passes_on: bool) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = strategy.n_heads, strategy.n_kv_heads
        self.makes_alpha, self.passes_on = makes_alpha, passes_on
        self.norm = backbone.norm(backbone.d_model)
        self.w_q = backbone.linear(backbone.d_model, strategy.n_heads * strategy.head_dim)
        if makes_alpha:
            self.w_alpha = backbone.linear(backbone.d_model, 2 * strategy.n_kv_heads * strategy.head_dim)
        else:
            dims = (strategy.n_kv_heads, strategy.delta_dim, strategy.head_dim)
            self.w_delta = backbone.linear(backbone.d_model, 2 * strategy.n_kv_heads * strategy.delta_dim)
            self.u_k = PerHeadLinear(*dims, backbone.init_std)
            self.u_v = PerHeadLinear(*dims, backbone.init_std)
        self.w_o = strategy.output.build(strategy.n_heads * strategy.head_dim, backbone)

    def forward(self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The update of the residual stream, and (k_alpha, v_alpha) or (k_delta, v_delta, and k, v to pass on)."""
        h_BTC = self.norm(x_BTC)
        if self.makes_alpha:
            k_new, v_new = split_heads(self.w_alpha(h_BTC), 2 * self.n_kv_heads).chunk(2, dim=2)
            k, v = context.append("k_alpha", k_new), context.append("v_alpha", v_new)
            made: tuple[Tensor, ...] = (k.values, v.values)
        else:
            k_new, v_new = split_heads(self.w_delta(h_BTC), 2 * self.n_kv_heads).chunk(2, dim=2)
            k_delta, v_delta = context.append("k_delta", k_new), context.append("v_delta", v_new)
            k_before, v_before = context.received(read)
            k = context.rebuilt(k_before.values + self.u_k(k_delta.values))
            v = context.rebuilt(v_before.values + self.u_v(v_delta.values))
            made = (k_delta.values, v_delta.values, *((k.values, v.values) if self.passes_on else ()))
        q_BTHD = context.rotate(split_heads(self.w_q(context.computed(h_BTC)), self.n_heads))
        out = attend([q_BTHD], [Segment(k=(context.rotate_history(k),), v=(v,))], context)
        return self.w_o(out), made
