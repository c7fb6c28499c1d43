"""Strategies for tests only: together they use the parts of the contract that the shipped ones do not."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from kvpath.attention.context import Context, History
from kvpath.attention.gqa import GQA
from kvpath.attention.layout import Read, Slot
from kvpath.attention.product import Segment, attend
from kvpath.attention.strategy import Backbone, split_heads

Made = tuple[Tensor, tuple[Tensor, ...]]


@dataclass(kw_only=True)
class WindowedGQA(GQA):
    """Even layers see the last `window` tokens only, odd ones all."""

    window: int

    def makes(self, layer: int) -> Mapping[str, Slot]:
        slots = super().makes(layer)
        return slots if layer % 2 else {name: replace(slot, window=self.window) for name, slot in slots.items()}


@dataclass(kw_only=True)
class SharedUpper(GQA):
    """As in YOCO: lower layers have windows, layer `middle` makes keys and values that all layers above read."""

    window: int
    middle: int

    def makes(self, layer: int) -> Mapping[str, Slot]:
        if layer > self.middle:
            return {}
        slots = super().makes(layer)
        return slots if layer == self.middle else {name: replace(s, window=self.window) for name, s in slots.items()}

    def reads(self, layer: int) -> tuple[Read, ...]:
        return (Read(self.middle, "k"), Read(self.middle, "v")) if layer > self.middle else ()

    def build(self, layer: int, backbone: Backbone) -> nn.Module:
        return ReadingAttention(self, backbone) if layer > self.middle else super().build(layer, backbone)


class ReadingAttention(nn.Module):
    """Queries of its own over keys and values of another layer."""

    def __init__(self, strategy: GQA, backbone: Backbone) -> None:
        super().__init__()
        self.n_heads = strategy.n_heads
        self.norm = backbone.norm(backbone.d_model)
        self.w_q = backbone.linear(backbone.d_model, strategy.n_heads * strategy.head_dim)
        self.w_o = strategy.output.build(strategy.n_heads * strategy.head_dim, backbone)

    def forward(self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context) -> Made:
        k, v = context.received(read)
        q_BTHD = context.rotate(split_heads(self.w_q(self.norm(context.computed(x_BTC))), self.n_heads))
        return self.w_o(attend([q_BTHD], [Segment(k=(k,), v=(v,))], context)), ()


@dataclass(kw_only=True)
class RunningState(GQA):
    """Later layers add an expansion of a small stored delta to keys and values, which are passed on but not stored."""

    delta_dim: int

    def makes(self, layer: int) -> Mapping[str, Slot]:
        state = super().makes(layer)
        if layer == 0:
            return state
        delta = {"delta": Slot(1, self.delta_dim)}
        return {**delta, **{f"{name}_state": replace(slot, cached=False) for name, slot in state.items()}}

    def reads(self, layer: int) -> tuple[Read, ...]:
        if layer == 0:
            return ()
        names = ("k", "v") if layer == 1 else ("k_state", "v_state")
        return tuple(Read(layer - 1, name) for name in names)

    def build(self, layer: int, backbone: Backbone) -> nn.Module:
        return super().build(layer, backbone) if layer == 0 else RunningAttention(self, backbone)


class RunningAttention(nn.Module):
    """k, v = the layer's below + U delta, over all tokens so far."""

    def __init__(self, strategy: RunningState, backbone: Backbone) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = strategy.n_heads, strategy.n_kv_heads
        self.norm = backbone.norm(backbone.d_model)
        self.w_q = backbone.linear(backbone.d_model, strategy.n_heads * strategy.head_dim)
        self.w_delta = backbone.linear(backbone.d_model, strategy.delta_dim)
        self.w_expand = backbone.linear(strategy.delta_dim, 2 * strategy.n_kv_heads * strategy.head_dim)
        self.w_o = strategy.output.build(strategy.n_heads * strategy.head_dim, backbone)

    def forward(self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context) -> Made:
        h_BTC = self.norm(x_BTC)
        delta = context.append("delta", split_heads(self.w_delta(h_BTC), 1))
        k_more, v_more = split_heads(self.w_expand(delta.values.flatten(2)), 2 * self.n_kv_heads).chunk(2, dim=2)
        k_more = context.rotate_history(delta._replace(values=k_more)).values
        k_below, v_below = context.received(read)
        k, v = context.rebuilt(k_below.values + k_more), context.rebuilt(v_below.values + v_more)
        q_BTHD = context.rotate(split_heads(self.w_q(context.computed(h_BTC)), self.n_heads))
        out = attend([q_BTHD], [Segment(k=(k,), v=(v,))], context)
        return self.w_o(out), (delta.values, k.values, v.values)


@dataclass(kw_only=True)
class LocalHistory(GQA):
    """Layer `middle` makes keys and values for itself and all layers above; these add a window of their own.

    `share` neighbouring layers form their windows from one hidden state: the input of the first of them.
    """

    window: int
    middle: int
    share: int = 1
    d_source: int
    """The model's width."""

    def source(self, layer: int) -> int:
        return layer - (layer - self.middle) % self.share

    def makes(self, layer: int) -> Mapping[str, Slot]:
        slots = super().makes(layer)
        if layer < self.middle:
            return slots
        source = self.source(layer)
        origin = None if source == layer else (source, "source")
        local = {f"{name}_local": replace(slot, window=self.window, formed_from=origin) for name, slot in slots.items()}
        passed_on = {"source": Slot(1, self.d_source, cached=False, over="new")} if source == layer else {}
        return {**(slots if layer == self.middle else {}), **local, **passed_on}

    def reads(self, layer: int) -> tuple[Read, ...]:
        if layer <= self.middle:
            return ()
        source = self.source(layer)
        origin = () if source == layer else (Read(source, "source"),)
        return (Read(self.middle, "k"), Read(self.middle, "v"), *origin)

    def build(self, layer: int, backbone: Backbone) -> nn.Module:
        if layer < self.middle:
            return super().build(layer, backbone)
        return LocalAttention(self, backbone, layer == self.middle, self.source(layer) == layer)


class LocalAttention(nn.Module):
    """Global and local keys in one softmax."""

    def __init__(self, strategy: LocalHistory, backbone: Backbone, makes_global: bool, makes_source: bool) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = strategy.n_heads, strategy.n_kv_heads
        self.makes_global, self.makes_source = makes_global, makes_source
        width = 2 * strategy.n_kv_heads * strategy.head_dim
        self.norm = backbone.norm(backbone.d_model)
        self.w_q = backbone.linear(backbone.d_model, strategy.n_heads * strategy.head_dim)
        if makes_global:
            self.w_global = backbone.linear(backbone.d_model, width)
        self.local_norm = backbone.norm(backbone.d_model)
        self.w_local = backbone.linear(backbone.d_model, width)
        self.w_o = strategy.output.build(strategy.n_heads * strategy.head_dim, backbone)

    def forward(self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context) -> Made:
        if self.makes_global:
            k_global, v_global = self.keys_values("", self.w_global(self.norm(x_BTC)), context)
        else:
            k_global, v_global, *rest = context.received(read)
        source_BTC = x_BTC if self.makes_source else rest[0].values.flatten(2)
        k_local, v_local = self.keys_values("_local", self.w_local(self.local_norm(source_BTC)), context)
        q_BTHD = context.rotate(split_heads(self.w_q(self.norm(context.computed(x_BTC))), self.n_heads))
        segments = [Segment(k=(k_global,), v=(v_global,)), Segment(k=(k_local,), v=(v_local,))]
        made = (k_global.values, v_global.values) if self.makes_global else ()
        source = (source_BTC[:, :, None],) if self.makes_source else ()
        return self.w_o(attend([q_BTHD], segments, context)), (*made, k_local.values, v_local.values, *source)

    def keys_values(self, suffix: str, kv_BTC: Tensor, context: Context) -> tuple[History, History]:
        k, v = split_heads(kv_BTC, 2 * self.n_kv_heads).chunk(2, dim=2)
        return context.append(f"k{suffix}", context.rotate(k)), context.append(f"v{suffix}", v)
