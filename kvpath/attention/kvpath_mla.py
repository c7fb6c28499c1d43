"""KVPath-MLA (KVPath, eqs. 12 and 13): one alpha latent a path, which each layer reads in its own way, and deltas."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvpath.attention.compact import CompactAttention
from kvpath.attention.context import Context, History
from kvpath.attention.latent import attend_latent
from kvpath.attention.layout import Heads, Read, Slot
from kvpath.attention.path import PathStrategy
from kvpath.attention.product import Segment, attend
from kvpath.attention.strategy import Backbone, rotary_problems, split_heads


@dataclass(kw_only=True)
class KVPathMLA(PathStrategy):
    """Each head's keys and values are [alpha || delta]: alpha comes from the path's latent, delta serves all heads.

    Stored per path: latent_dim + 2 m d_delta elements. Only deltas are rotated.
    """

    head_dim: int
    """Features of each head's alpha key and value, which are made from the latent."""

    latent_dim: int
    """Features of the alpha latent, made by a path's first layer."""

    delta_dim: int
    """Features of the delta key and value that every layer makes for itself (d_delta), shared by its heads."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the fields."""
        yield from super().problems()
        yield from rotary_problems("delta_dim", self.delta_dim)
        for name in ("head_dim", "latent_dim", "delta_dim"):
            if getattr(self, name) < 1:
                yield f"{name} must be positive, got {getattr(self, name)}"

    def makes(self, layer: int) -> Mapping[str, Slot]:
        """Deltas in every layer; before them the latent, over its root mean square, in the first layer of a path."""
        first = {"alpha": Slot(1, self.latent_dim)} if self.starts_path(layer) else {}
        return {**first, "k_delta": Slot(1, self.delta_dim), "v_delta": Slot(1, self.delta_dim)}

    def reads(self, layer: int) -> tuple[Read, ...]:
        """The latent of the path."""
        start = self.path_start(layer)
        return () if layer == start else (Read(start, "alpha"),)

    def heads(self, layer: int) -> Heads:
        """Alpha and delta side by side, of which the delta is rotated."""
        width = self.head_dim + self.delta_dim
        return Heads(self.n_heads, width, width, rotary_dim=self.delta_dim)

    def decode_flops(self, layer: int, n_keys: int) -> int:
        """Absorbed: scores and sums over the latent and the deltas; nothing is expanded.

        The up-projection meets the query and the sum instead of every key, so it is counted once, as every weight.
        """
        return 4 * self.n_heads * (self.latent_dim + self.delta_dim) * n_keys

    def build(self, layer: int, backbone: Backbone) -> nn.Module:
        """The attention module of a layer."""
        return PathLatentAttention(self, backbone, makes_alpha=self.starts_path(layer))

    def compact(self, layer: int, attentions: Sequence[nn.Module]) -> nn.Module:
        """The absorbed form."""
        plain = attentions[layer]
        assert isinstance(plain, PathLatentAttention)
        return CompactPathLatentAttention(plain)


class PathLatentAttention(nn.Module):
    """k_alpha, v_alpha = W_up (gain * c / rms(c)); k = [k_alpha || RoPE(k_delta)], v = [v_alpha || v_delta]."""

    def __init__(self, strategy: KVPathMLA, backbone: Backbone, makes_alpha: bool) -> None:
        super().__init__()
        self.n_heads, self.makes_alpha = strategy.n_heads, makes_alpha
        self.dims = (strategy.head_dim, strategy.delta_dim)
        width = strategy.n_heads * sum(self.dims)
        self.norm = backbone.norm(backbone.d_model)
        self.w_q = backbone.linear(backbone.d_model, width)
        if makes_alpha:
            self.w_alpha = backbone.linear(backbone.d_model, strategy.latent_dim)
            self.norm_eps = backbone.norm_eps
        self.gain = Gain(strategy.latent_dim)
        self.w_up = backbone.linear(strategy.latent_dim, 2 * strategy.n_heads * strategy.head_dim)
        self.w_delta = backbone.linear(backbone.d_model, 2 * strategy.delta_dim)
        self.w_o = strategy.output.build(width, backbone)

    def forward(self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The update of the residual stream, and (alpha in a path's first layer,) k_delta, v_delta."""
        q_parts, alpha, k_delta, v_delta = self.project(x_BTC, read, context)
        k_up, v_up = split_heads(self.w_up(self.gain(alpha.values.flatten(2))), 2 * self.n_heads).chunk(2, dim=2)
        segment = Segment(k=(alpha._replace(values=k_up), k_delta), v=(alpha._replace(values=v_up), v_delta))
        return self.w_o(attend(q_parts, [segment], context)), self.made(alpha, k_delta, v_delta)

    def project(
        self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context
    ) -> tuple[list[Tensor], History, History, History]:
        """Queries [alpha, delta], the path's latent, and the deltas of keys and values."""
        h_BTC = self.norm(x_BTC)
        if self.makes_alpha:
            c_BTD = self.w_alpha(h_BTC)
            # Without gain, and in training too: every layer of the path reads the same rounded numbers.
            c_BTD = F.rms_norm(c_BTD, c_BTD.shape[-1:], eps=self.norm_eps)
            alpha = context.append("alpha", split_heads(c_BTD, 1))
        else:
            (alpha,) = context.received(read)
        k, v = split_heads(self.w_delta(h_BTC), 2).chunk(2, dim=2)
        k_delta, v_delta = context.append("k_delta", context.rotate(k)), context.append("v_delta", v)
        q_BTHD = split_heads(self.w_q(context.computed(h_BTC)), self.n_heads)
        q_alpha, q_delta = q_BTHD.split(self.dims, dim=-1)
        return [q_alpha, context.rotate(q_delta)], alpha, k_delta, v_delta

    def made(self, alpha: History, k_delta: History, v_delta: History) -> tuple[Tensor, ...]:
        """What this layer made of these."""
        return (*((alpha.values,) if self.makes_alpha else ()), k_delta.values, v_delta.values)


class CompactPathLatentAttention(CompactAttention[PathLatentAttention]):
    """Absorbed for few queries: the path's latent is met as it is stored, once for keys and values.

    Beyond the cache it holds tiles of scores and, for many queries, of expanded latents.
    """

    def forward(self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As the plain module's."""
        q_parts, alpha, k_delta, v_delta = self.plain.project(x_BTC, read, context)
        w_up, gain = self.plain.w_up.get_parameter("weight"), self.plain.gain.weight
        out = attend_latent(q_parts, alpha, w_up, gain, [k_delta], [v_delta], context)
        return self.plain.w_o(out), self.plain.made(alpha, k_delta, v_delta)


class Gain(nn.Module):
    """x * weight over the last dimension: the part of an RMSNorm that a layer has for itself."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gains to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and dtype as `x`."""
        return x * self.weight.to(x.dtype)
