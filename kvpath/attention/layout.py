"""The layout of keys and values across depth: one frozen value from which everything else is derived.

What each layer makes for every token, what of it is stored, and whose entries each layer reads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvpath.errors import UserError


@dataclass(frozen=True)
class Slot:
    """One tensor that a layer makes for every token, of shape (B, T, heads, dim)."""

    heads: int
    """Number of heads: 1 for something that all heads share."""

    dim: int
    """Features of each head."""

    window: int | None = None
    """How many of the latest tokens are kept, the current one included; None keeps all."""

    cached: bool = True
    """Whether it is stored between passes. What is not stored lives for one pass only."""

    over: Literal["history", "new"] = "history"
    """For what is not cached: whether it spans all stored tokens (a state rebuilt from them) or the new ones."""

    formed_from: tuple[int, str] | None = None
    """The slot (owner, name) over the new tokens that its entries are made from; None for its layer's own input.

    A layer that forms its entries from a source needs its own input only where it computes.
    """

    @property
    def elements(self) -> int:
        """Elements per token."""
        return self.heads * self.dim


@dataclass(frozen=True)
class Read:
    """That a layer reads what an earlier layer made."""

    owner: int
    """The layer that makes the slot."""

    name: str
    """The slot's name at its owner."""

    columns: tuple[int, int] | None = None
    """The half-open range of each head's features that is touched; None for all."""


@dataclass(frozen=True)
class Heads:
    """The shape of one layer's attention product."""

    n_heads: int
    """Query heads."""

    qk_dim: int
    """Width of a query and of a key."""

    v_dim: int
    """Width of a value."""

    rotary_dim: int = 0
    """How many of the query's and key's features are rotated by position."""

    @property
    def flops_per_key(self) -> int:
        """FLOPs of a query's score with one key and of adding its value; a multiply-add is 2."""
        return 2 * self.n_heads * (self.qk_dim + self.v_dim)


@dataclass(frozen=True)
class LayerLayout:
    """What one layer makes and reads; a block's `made` and `read` tuples are in these orders."""

    makes: Mapping[str, Slot]
    reads: tuple[Read, ...]
    heads: Heads


@dataclass(frozen=True)
class Layout:
    """The layout of a whole model, checked when it is made.

    Raises:
        UserError: every problem found, each naming the layer, the field and the value.
    """

    layers: tuple[LayerLayout, ...]
    last_readers: Mapping[tuple[int, str], int] = field(init=False, repr=False, compare=False)
    """For each slot that a later layer reads: the last one that does."""

    def __post_init__(self) -> None:
        UserError.raise_all(self._problems())
        readers = {(read.owner, read.name): layer for layer, read in self._reads()}
        object.__setattr__(self, "last_readers", readers)

    def slot(self, owner: int, name: str) -> Slot:
        """The slot `name` of layer `owner`."""
        return self.layers[owner].makes[name]

    def slots(self) -> Iterator[tuple[int, str, Slot]]:
        """All slots as (owner, name, slot), from the bottom up."""
        for layer, entry in enumerate(self.layers):
            for name, slot in entry.makes.items():
                yield layer, name, slot

    def readers(self, owner: int, name: str) -> tuple[int, ...]:
        """The layers that read the slot `name` of layer `owner`, from the bottom up."""
        return tuple(layer for layer, read in self._reads() if (read.owner, read.name) == (owner, name))

    def cached(self) -> Iterator[tuple[int, str, Slot]]:
        """The slots that a cache stores."""
        return ((layer, name, slot) for layer, name, slot in self.slots() if slot.cached)

    def touched(self, layer: int) -> dict[tuple[int, str], frozenset[int]]:
        """The stored columns that one decoding step of `layer` must touch, per (owner, name).

        A layer touches what it stores itself and what it reads. A state that is rebuilt and not stored stands for
        all that its maker touched.
        """
        entry = self.layers[layer]
        found: dict[tuple[int, str], frozenset[int]] = {
            (layer, name): frozenset(range(slot.dim)) for name, slot in entry.makes.items() if slot.cached
        }
        for read in entry.reads:
            slot = self.slot(read.owner, read.name)
            if slot.cached:
                columns = frozenset(range(*(read.columns or (0, slot.dim))))
                sources = {(read.owner, read.name): columns}
            else:
                sources = self.touched(read.owner) if slot.over == "history" else {}
            for key, columns in sources.items():
                found[key] = found.get(key, frozenset()) | columns
        return found

    def _reads(self) -> Iterator[tuple[int, Read]]:
        for layer, entry in enumerate(self.layers):
            for read in entry.reads:
                yield layer, read

    def _problems(self) -> Iterator[str]:
        if not self.layers:
            yield "layout: a model needs at least one layer"
        for layer, name, slot in self.slots():
            where = f"layout: layer {layer} makes[{name!r}]"
            if slot.heads < 1 or slot.dim < 1:
                yield f"{where}: heads and dim must be positive, got {slot.heads} x {slot.dim}"
            if slot.window is not None and slot.window < 1:
                yield f"{where}: window must be positive or None, got {slot.window}"
            if slot.over not in ("history", "new"):
                yield f"{where}: over must be 'history' or 'new', got {slot.over!r}"
            if slot.cached and slot.over == "new":
                yield f"{where}: a cached slot is a history, so over='new' needs cached=False"
            if slot.window is not None and not slot.cached:
                yield f"{where}: only a cached slot has a window, got window={slot.window} with cached=False"
        for layer, entry in enumerate(self.layers):
            heads = entry.heads
            if min(heads.n_heads, heads.qk_dim, heads.v_dim) < 1:
                yield f"layout: layer {layer}: n_heads, qk_dim and v_dim must be positive, got {heads}"
            if heads.rotary_dim % 2 or not 0 <= heads.rotary_dim <= heads.qk_dim:
                yield (
                    f"layout: layer {layer}: rotary_dim must be even and at most qk_dim={heads.qk_dim},"
                    f" got {heads.rotary_dim}"
                )
        for layer, read in self._reads():
            where = f"layout: layer {layer} reads[{read.name!r}] of layer {read.owner}"
            if not 0 <= read.owner < len(self.layers):
                yield f"{where}: there is no layer {read.owner}; layers are 0 to {len(self.layers) - 1}"
            elif read.owner >= layer:
                yield f"{where}: an owner must come before its reader"
            elif read.name not in self.layers[read.owner].makes:
                made = ", ".join(self.layers[read.owner].makes) or "nothing"
                yield f"{where}: that layer makes {made}"
            elif read.columns is not None:
                first, end = read.columns
                dim = self.slot(read.owner, read.name).dim
                if not 0 <= first < end <= dim:
                    yield f"{where}: columns must be a range within 0 to {dim}, got {read.columns}"
        for layer, name, slot in self.slots():
            source = slot.formed_from
            if source is None:
                continue
            where = f"layout: layer {layer} makes[{name!r}]: formed_from={source}"
            if source not in [(read.owner, read.name) for read in self.layers[layer].reads]:
                yield f"{where} is not among the layer's reads"
            elif source in [(owner, made) for owner, made, slot in self.slots() if slot.over != "new"]:
                yield f"{where} must be a slot with over='new'"
