"""The contract that every attention layout fulfils."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from kvpath.attention.layout import Heads, LayerLayout, Layout, Read, Slot
from kvpath.attention.output import DenseOutput, OutputProjection
from kvpath.errors import UserError


class Backbone(Protocol):
    """What a strategy may know of the model around it. Norms and linear layers come initialised."""

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        ...

    @property
    def norm_eps(self) -> float:
        """Epsilon of every RMSNorm."""
        ...

    @property
    def init_std(self) -> float:
        """Standard deviation of all initial weights."""
        ...

    def norm(self, dim: int) -> nn.Module:
        """A normalisation over the last `dim` features."""
        ...

    def linear(self, n_in: int, n_out: int) -> nn.Module:
        """A linear layer."""
        ...


@dataclass(kw_only=True)
class AttentionStrategy(ABC):
    """How keys and values are made, shared and stored across layers.

    A strategy states what each layer makes and reads (`makes`, `reads`, `heads`) and builds one attention module a
    layer. All else, the routing in the model, the cache, parameters, FLOPs, is derived from these.
    """

    n_heads: int
    """Query heads of each layer."""

    output: OutputProjection = field(default_factory=DenseOutput)
    """The write side: how the heads' outputs become an update of the residual stream."""

    def __post_init__(self) -> None:
        UserError.raise_all(self.problems())

    def problems(self) -> Iterator[str]:
        """What is wrong with the fields, one line each; extended by each strategy."""
        if self.n_heads < 1:
            yield f"n_heads must be positive, got {self.n_heads}"

    @classmethod
    def examples(cls) -> Sequence["AttentionStrategy"]:
        """Small instances, of odd sizes, for `kvpath.testing` and `kvpath check`, which run them over five layers.

        None lets these take small values for the usual fields (n_heads, n_kv_heads, head_dim, path_length, ...); a
        class that adds fields of other names without a default states its own.
        """
        return ()

    @abstractmethod
    def makes(self, layer: int) -> Mapping[str, Slot]:
        """The slots that `layer` makes, in the order in which its module returns them."""

    def reads(self, layer: int) -> tuple[Read, ...]:
        """The slots of earlier layers that `layer` reads, in the order in which its module receives them."""
        return ()

    @abstractmethod
    def heads(self, layer: int) -> Heads:
        """The shape of the attention product of `layer`."""

    @abstractmethod
    def build(self, layer: int, backbone: Backbone) -> nn.Module:
        """The attention module of `layer`: ``update, made = module(x_BTC, read, context)``.

        It receives the residual stream and owns its pre-norm; `made` is a tuple in the order of `makes`, `read` one in
        the order of `reads`, each (B, S, heads, dim).
        """

    def compact(self, layer: int, attentions: Sequence[nn.Module]) -> nn.Module | None:
        """A leaner module for passes with a store, from those of `build`; None where the plain one needs no other.

        It is called as the plain one is, in the order of `compact_layout`, and never for gradients. It may use the
        weights of all layers, holds what it derives from them in non-persistent buffers, and owns no parameters (see
        `kvpath.attention.compact`).
        """
        return None

    def compact_layout(self, backbone: Backbone) -> Layout:
        """The layout by which compact modules make and read: the same stored slots, other states and reads if need be.

        Raises:
            UserError: as `layout`.
        """
        return self.layout(backbone)

    def decode_flops(self, layer: int, n_keys: int) -> int:
        """FLOPs that one decoding step of `layer` spends on `n_keys` visible stored keys, over all its segments.

        A multiply-add is 2. What is spent whatever the number of keys, once through each weight, is left out: it is
        counted from the module. Override it where decoding has arithmetic of its own: an absorbed product over
        latents, states that are rebuilt.
        """
        return self.heads(layer).flops_per_key * n_keys

    def layout(self, backbone: Backbone) -> Layout:
        """The layout over all layers, checked.

        Raises:
            UserError: naming the layer, the field and the value.
        """
        return Layout(
            tuple(
                LayerLayout(self.makes(layer), self.reads(layer), self.heads(layer))
                for layer in range(backbone.n_layers)
            )
        )


def split_heads(x_BTC: Tensor, n_heads: int) -> Tensor:
    """(B, T, H * D) as (B, T, H, D)."""
    return x_BTC.unflatten(-1, (n_heads, -1))


def grouping_problems(n_heads: int, n_kv_heads: int) -> Iterator[str]:
    """What is wrong with sharing each of `n_kv_heads` among the query heads."""
    if n_kv_heads < 1 or n_heads % max(n_kv_heads, 1):
        divisors = [heads for heads in range(1, n_heads + 1) if n_heads % heads == 0]
        yield f"n_kv_heads must divide n_heads={n_heads} (one of {divisors}), got {n_kv_heads}"


def rotary_problems(name: str, dim: int) -> Iterator[str]:
    """What is wrong with rotating `dim` features, which go in pairs."""
    if dim < 0 or dim % 2:
        yield f"{name} is rotated in pairs, so it must be even and not negative, got {dim}"
