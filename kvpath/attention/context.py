"""What a block needs to know about the pass it is in: positions, what is visible, what is stored."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvpath.attention.layout import Layout, Read, Slot
from kvpath.attention.prefill import PrefillPlan
from kvpath.attention.rotary import Angles, rotary_angles, rotate


@dataclass(frozen=True)
class Index:
    """Where a row of tokens stands. All tensors are (B, T), or (1, T) where every row is the same."""

    positions: Tensor
    """int64: the position of each token in its sequence or document."""

    valid: Tensor | None = None
    """bool: False for padding; None if nothing is padding."""

    documents: Tensor | None = None
    """int64: which document a token belongs to; None if attention may cross documents."""

    plain: bool = False
    """Known to be positions 0 to T - 1 in every row, no padding, one document: the mask need not be built."""

    @classmethod
    def start(cls, length: int, device: torch.device | str = "cpu") -> "Index":
        """Positions 0 to length - 1, the same for every row."""
        return cls(torch.arange(length, device=device)[None], plain=True)

    def __len__(self) -> int:
        return self.positions.shape[1]

    def last(self, count: int) -> "Index":
        """The last `count` tokens."""
        if count == len(self):
            return self
        valid, documents = (part[:, -count:] if part is not None else None for part in (self.valid, self.documents))
        return Index(self.positions[:, -count:], valid, documents)

    def part(self, tokens: slice) -> "Index":
        """Some of the tokens."""
        valid, documents = (part[:, tokens] if part is not None else None for part in (self.valid, self.documents))
        return Index(self.positions[:, tokens], valid, documents)


class History(NamedTuple):
    """A slot's entries for all S stored tokens, and where they stand."""

    values: Tensor
    """(B, S, heads, dim)"""

    index: Index  # type: ignore[assignment]
    """Positions, validity and documents of the S entries: they belong to the slot, since windows differ."""

    window: int | None = None


class Store(Protocol):
    """What keeps entries between passes (see `kvpath.inference.cache`)."""

    def begin(self, new: Index) -> None:
        """Open a pass over `new` tokens; no entry is appended outside of one."""
        ...

    def advance(self) -> None:
        """Close the pass, after the last layer: every slot's length advances together."""
        ...

    def place(self, tokens: Tensor) -> Index:
        """Where the next tokens (B, T) stand if none of them is padding."""
        ...

    def append(self, layer: int, name: str, new: Tensor) -> History:
        """Add the entries (B, T, heads, dim) of this pass and give all that are stored, new ones last."""
        ...

    def index(self, layer: int, name: str) -> Index:
        """Where the stored entries of a slot stand, this pass's included."""
        ...

    def full_index(self) -> Index:
        """Where all tokens so far stand, this pass's included."""
        ...


@dataclass(frozen=True)
class Context:
    """One layer's view of one pass over T new tokens. Holds no state: a block may run twice on it."""

    layout: Layout
    new: Index
    """The T new tokens of the pass."""

    rotary_base: float
    angles: dict[int, Angles]
    """Cosines and sines of the new tokens, by rotary dimension."""

    masks: dict[int | None, Tensor | None]
    """What the new tokens see of each other, by window: (B, 1, T, T) bool, or None where plainly causal."""

    layer: int = 0
    """Needed with a store or a plan alone: for a compiler, layers that are told apart by their number have no graph in
    common."""

    makes: Mapping[str, Slot] = field(default_factory=dict)
    """What the layer makes."""

    reads: tuple[tuple[Read, Slot], ...] = ()
    """What the layer reads, in order, with the slots that are read."""

    store: Store | None = None
    """Where entries are kept; None in training, where the new tokens are the whole history."""

    plan: PrefillPlan | None = None
    """How many positions each layer computes; None for all."""

    plain_angles: dict[int, Angles] = field(default_factory=dict)
    """Cosines and sines of all stored tokens of plain rows, by rotary dimension, as soon as a layer asks for them."""

    @classmethod
    def of(
        cls,
        layout: Layout,
        new: Index,
        rotary_base: float,
        store: Store | None = None,
        plan: PrefillPlan | None = None,
    ) -> "Context":
        """Prepare a pass: angles and masks are made once, before the first layer, and only looked up inside blocks."""
        dims = {entry.heads.rotary_dim for entry in layout.layers} - {0}
        angles = {dim: rotary_angles(new.positions, dim, rotary_base) for dim in sorted(dims)}
        masks: dict[int | None, Tensor | None] = {}
        if store is None:
            windows = {slot.window for _, _, slot in layout.slots()} | {None}
            masks = {window: visible(new, new, window) for window in windows}
        return cls(layout, new, rotary_base, angles, masks, store=store, plan=plan).at(0)

    def at(self, layer: int) -> "Context":
        """The same pass, seen from another layer."""
        entry = self.layout.layers[layer]
        reads = tuple((read, self.layout.slot(read.owner, read.name)) for read in entry.reads)
        return replace(self, layer=layer, makes=entry.makes, reads=reads)

    def append(self, name: str, new_BTHD: Tensor) -> History:
        """Store the new tokens' entries of this layer's slot `name`; gives the slot's whole history.

        In training this is the identity.
        """
        window = self.makes[name].window
        if self.store is None:
            return History(new_BTHD, self.new.last(new_BTHD.shape[1]), window)
        return self.store.append(self.layer, name, new_BTHD)

    def received(self, read: tuple[Tensor, ...]) -> tuple[History, ...]:
        """What this layer reads, in the order of its layout's reads, with where it stands."""
        return tuple(
            History(values, self._index(source, slot, values.shape[1]), slot.window)
            for values, (source, slot) in zip(read, self.reads, strict=True)
        )

    def rebuilt(self, values_BSHD: Tensor) -> History:
        """A state over all tokens so far that this layer rebuilt from stored parts and that is not stored itself."""
        return History(values_BSHD, self.new if self.store is None else self.store.full_index())

    def rotate(self, x_BTHD: Tensor) -> Tensor:
        """Rotate queries or keys of the new tokens (or of their last T) over all their features."""
        return rotate(x_BTHD, self._angles(x_BTHD.shape[1], x_BTHD.shape[-1]))

    def rotate_pairs(self, x_BTHD: Tensor, full_dim: int, first_pair: int) -> Tensor:
        """Rotate a block of the features of heads that have `full_dim` of them.

        The block's pairs are the pairs first_pair, first_pair + 1, ... (modulo full_dim / 2) of such a head.
        """
        cos, sin = (part.roll(-first_pair, dims=-1) for part in self._angles(x_BTHD.shape[1], full_dim))
        pairs = x_BTHD.shape[-1] // 2
        return rotate(x_BTHD, (cos[..., :pairs], sin[..., :pairs]))

    def rotate_history(self, keys: History) -> History:
        """Rotate keys of all tokens so far, where what is stored is not rotated."""
        if keys.index is self.new:
            return keys._replace(values=self.rotate(keys.values))
        angles = self.stored_angles(keys.index, slice(None), keys.values.shape[-1])
        return keys._replace(values=rotate(keys.values, angles))

    def stored_angles(self, keys: Index, part: slice, dim: int) -> Angles:
        """Cosines and sines of some stored tokens, (B, s, 1, dim / 2).

        Those of plain rows, which are the same for every layer and slot, are made once a pass.
        """
        if not keys.plain:
            return rotary_angles(keys.positions[:, part], dim, self.rotary_base)
        if dim not in self.plain_angles:
            self.plain_angles[dim] = rotary_angles(keys.positions, dim, self.rotary_base)
        cos, sin = self.plain_angles[dim]
        return cos[:, part], sin[:, part]

    def computed(self, x_BTC: Tensor) -> Tensor:
        """The last tokens of `x_BTC` whose output this layer must compute: all but in a prefill of a suffix."""
        return x_BTC if self.plan is None else x_BTC[:, -self.plan.computed[self.layer] :]

    def visibility(self, n_queries: int, keys: Index, window: int | None) -> tuple[Tensor | None, bool]:
        """What the last `n_queries` new tokens see of `keys`: a (B, 1, T, S) mask or None, and whether to use causal.

        The mask is aligned by positions, so a chunk on a non-empty cache is right by construction.
        """
        if keys.plain and self.new.positions.shape[1] <= len(keys) and (window is None or window >= len(keys)):
            if n_queries == 1:
                return None, False
            if n_queries == len(keys):
                return None, True
        if keys is self.new and n_queries == len(keys) and window in self.masks:
            return self.masks[window], False
        return visible(self.new.last(n_queries), keys, window), False

    def visible_tile(self, n_queries: int, rows: slice, keys: Index, part: slice, window: int | None) -> Tensor | bool:
        """What some rows of the last `n_queries` new tokens see of a part of `keys`: a (B, 1, t, s) mask, all or none.

        Only for a pass with a store, where plain keys end with the new tokens.
        """
        if keys.plain and window is None:
            earlier = len(keys) - n_queries
            if part.start >= earlier + rows.stop:
                return False
            if part.stop <= earlier + rows.start + 1:
                return True
        mask = visible(self.new.last(n_queries).part(rows), keys.part(part), window)
        assert mask is not None
        return mask

    def _angles(self, count: int, dim: int) -> Angles:
        cos, sin = self.angles.get(dim) or rotary_angles(self.new.positions, dim, self.rotary_base)
        return cos[:, -count:], sin[:, -count:]

    def _index(self, source: Read, slot: Slot, length: int) -> Index:
        if self.store is None or slot.over == "new":
            return self.new.last(length)
        return self.store.index(source.owner, source.name) if slot.cached else self.store.full_index()


def visible(queries: Index, keys: Index, window: int | None) -> Tensor | None:
    """Whether each query may see each key, (B, 1, T, S) bool; None where both are one plain row without a window.

    A key is seen if it is not padding, not in the future, within the window (the current token counts) and in the
    query's document.
    """
    if queries is keys and keys.plain and (window is None or window >= len(keys)):
        return None
    # Compared, not subtracted: a distance takes eight times the memory of what is wanted of it.
    query_BT1, key_B1S = queries.positions[:, :, None], keys.positions[:, None, :]
    seen_BTS = key_B1S <= query_BT1
    if window is not None:
        seen_BTS &= key_B1S > query_BT1 - window
    if keys.valid is not None:
        seen_BTS = seen_BTS & keys.valid[:, None, :]
    if queries.documents is not None and keys.documents is not None:
        seen_BTS = seen_BTS & (queries.documents[:, :, None] == keys.documents[:, None, :])
    return seen_BTS[:, None]
