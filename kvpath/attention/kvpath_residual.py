"""KVPath-Residual (KVPath, eqs. 6 to 9): each layer adds an expanded low-dimensional delta to the state before it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kvpath.attention.compact import CompactAttention
from kvpath.attention.context import Context, History
from kvpath.attention.layout import Heads, LayerLayout, Layout, Read, Slot
from kvpath.attention.path import PathStrategy
from kvpath.attention.per_head import PerHeadLinear
from kvpath.attention.product import Segment, attend
from kvpath.attention.rotary import rotate_in_place
from kvpath.attention.strategy import Backbone, grouping_problems, rotary_problems, split_heads
from kvpath.attention.tiles import KeyRange, Rebuilt, attend_in_tiles


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

    def compact(self, layer: int, attentions: Sequence[nn.Module]) -> nn.Module:
        """Values in alpha and delta coordinates, keys rebuilt in tiles."""
        path = [
            module for module in attentions[self.path_start(layer) : layer + 1] if isinstance(module, ResidualAttention)
        ]
        return CompactResidualAttention(path)

    def compact_layout(self, backbone: Backbone) -> Layout:
        """No state is passed on: a layer reads the alphas and deltas of its path."""
        stored = [
            {name: slot for name, slot in entry.makes.items() if slot.cached} for entry in self.layout(backbone).layers
        ]
        return Layout(
            tuple(
                LayerLayout(
                    makes,
                    tuple(
                        Read(owner, name) for owner in range(self.path_start(layer), layer) for name in stored[owner]
                    ),
                    self.heads(layer),
                )
                for layer, makes in enumerate(stored)
            )
        )


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
        q_BTHD, k, v = self.project(x_BTC, context)
        made: tuple[Tensor, ...] = (k.values, v.values)
        if not self.makes_alpha:
            k_before, v_before = context.received(read)
            k = context.rebuilt(k_before.values + self.u_k(k.values))
            v = context.rebuilt(v_before.values + self.u_v(v.values))
            if self.passes_on:
                made = (*made, k.values, v.values)
        out = attend([q_BTHD], [Segment(k=(context.rotate_history(k),), v=(v,))], context)
        return self.w_o(out), made

    def project(self, x_BTC: Tensor, context: Context) -> tuple[Tensor, History, History]:
        """Rotated queries, and what this layer stores: alphas or deltas of keys and values."""
        h_BTC = self.norm(x_BTC)
        name, w_kv = ("alpha", self.w_alpha) if self.makes_alpha else ("delta", self.w_delta)
        k, v = split_heads(w_kv(h_BTC), 2 * self.n_kv_heads).chunk(2, dim=2)
        q_BTHD = context.rotate(split_heads(self.w_q(context.computed(h_BTC)), self.n_heads))
        return q_BTHD, context.append(f"k_{name}", k), context.append(f"v_{name}", v)


class CompactResidualAttention(CompactAttention[ResidualAttention]):
    """Values stay apart, out = sum(p v_alpha) + U_V sum(p v_delta) + ...; keys are rebuilt and rotated in tiles.

    It reads the alphas and deltas of its path in place of the state before it. Beyond the cache it holds a tile of
    keys and of scores, and in a pass over plain rows one table of angles for all layers.
    """

    def __init__(self, path: Sequence[ResidualAttention]) -> None:
        super().__init__(path[-1])
        self._later = tuple(path[1:])

    def forward(self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As the plain module's, but for the state, which is not passed on."""
        q_BTHD, k, v = self.plain.project(x_BTC, context)
        earlier = context.received(read)
        k_alpha, *k_deltas = (part.values.transpose(1, 2) for part in (*earlier[::2], k))
        wide = torch.promote_types(q_BTHD.dtype, torch.float32)
        u_BGID = self._expansion(q_BTHD.shape[0], wide)

        def keys(tokens: slice) -> Tensor:
            k_BGSD = k_alpha[:, :, tokens].to(wide)
            if u_BGID is None:
                k_BGSD = k_BGSD.clone()
            else:
                deltas = []
                for part in k_deltas:  # no comprehension: for one, a compiler would fix the range of tokens
                    deltas.append(part[:, :, tokens])
                delta_BGSI = torch.cat(deltas, dim=-1).to(wide)
                operands = (part.flatten(0, 1) for part in (k_BGSD, delta_BGSI, u_BGID))
                k_BGSD = torch.baddbmm(*operands).unflatten(0, k_BGSD.shape[:2])
            cos, sin = context.stored_angles(k.index, tokens, k_BGSD.shape[-1])
            rotate_in_place(k_BGSD, (cos.transpose(1, 2), sin.transpose(1, 2)))
            return k_BGSD.transpose(1, 2)

        k_part = Rebuilt(k_alpha.shape[1], k_alpha.shape[-1], keys)
        values = [part.values for part in (*earlier[1::2], v)]
        scale = 1 / math.sqrt(q_BTHD.shape[-1])
        out, *deltas = attend_in_tiles([q_BTHD], [KeyRange([k_part], values, k.index)], context, scale)
        for layer, delta in zip(self._later, deltas, strict=True):
            grouped = delta.unflatten(2, (self.plain.n_kv_heads, -1))
            out = out + torch.einsum("btgri,goi->btgro", grouped, layer.u_v.weight).flatten(2, 3)
        return self.plain.w_o(out.flatten(2)), (k.values, v.values)

    def _expansion(self, batch: int, dtype: torch.dtype) -> Tensor | None:
        """U_K of the path's later layers one below the other, (B, G, sum of delta widths, D); None in its first."""
        if not self._later:
            return None
        u_GID = torch.cat([layer.u_k.weight.mT for layer in self._later], dim=1).to(dtype)
        return u_GID.expand(batch, -1, -1, -1)
