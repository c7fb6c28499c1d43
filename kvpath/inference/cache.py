"""The cache: allocated from the layout, so that the bytes in memory are the bytes on paper."""

from collections.abc import Mapping
from copy import copy
from pathlib import Path

import torch
from torch import Tensor

from kvpath.analysis.allocation import BLOCK, whole_blocks
from kvpath.attention.context import History, Index
from kvpath.attention.layout import Layout
from kvpath.inference.entries import Entries
from kvpath.inference.memory import refuse_a_cache_that_does_not_fit
from kvpath.inference.placement import Placement


class Cache:
    """Keys and values of earlier tokens, in memory for whole blocks of tokens.

    A slot with a window is a ring of that many entries. Rows may be padded, and then each has positions of its own. A
    pass over one token copies nothing: histories are views of the entries so far, never of the whole capacity. It is
    for inference: no gradient passes through it.
    """

    def __init__(
        self,
        layout: Layout,
        batch: int,
        capacity: int = 0,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        slot_dtypes: Mapping[str, torch.dtype] | None = None,
        block: int = BLOCK,
    ) -> None:
        """Allocate.

        Args:
            layout: the model's.
            batch: rows.
            capacity: tokens to make room for at once, rounded up to whole blocks. More is added, a block at a time and
                with a copy of all, when it is exceeded.
            dtype: of the stored entries; the model's, or every pass converts all of them.
            device: the model's.
            slot_dtypes: other dtypes for some slots, by name.
            block: tokens to a block.

        Raises:
            UserError: it does not fit into memory; says what it needs, before anything is allocated.
        """
        self.layout, self.batch, self.block = layout, batch, block
        self.dtype, self.device, self.slot_dtypes = dtype, torch.device(device), dict(slot_dtypes or {})
        self.capacity = 0
        self._length = 0
        self._slots = {
            (layer, name): Entries(slot, batch, 0, self.slot_dtypes.get(name, dtype), device)
            for layer, name, slot in layout.cached()
        }
        self._windows = sorted({slot.window for _, _, slot in layout.cached() if slot.window is not None})
        self.placement = Placement(batch, device)
        self._placed: Index | None = None
        self._new: Index | None = None
        self._full = self.placement.first(0)
        self._rings: dict[int, Index] = {}
        self._passing: dict[tuple[int, str], Index] = {}
        self.reserve(capacity)

    def __len__(self) -> int:
        """Tokens of each row so far, padding included."""
        return self._length

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that is allocated, by name; a slot `k` of layer 3 is `3.k`."""
        slots = {f"{layer}.{name}": entries.memory for (layer, name), entries in self._slots.items()}
        return self.placement.tensors | slots

    @property
    def bytes_allocated(self) -> int:
        """Bytes of all memory that it holds."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())

    @property
    def elements(self) -> int:
        """Elements of keys and values stored now, over all rows."""
        return sum(self.batch * self._used(entries) * entries.slot.elements for entries in self._slots.values())

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens in each row, in whole blocks.

        Raises:
            UserError: it does not fit into memory.
        """
        if tokens <= self.capacity:
            return
        capacity = whole_blocks(tokens, self.block)
        refuse_a_cache_that_does_not_fit(
            self.layout,
            self.batch,
            capacity,
            self.dtype,
            self.device,
            self.slot_dtypes,
            padded=not self.placement.plain,
            held=self.bytes_allocated,
        )
        self.placement.reserve(capacity)
        for key, entries in self._slots.items():
            self._slots[key] = entries.resized(capacity, self._used(entries))
        self.capacity = capacity

    def place(self, tokens: Tensor, valid: Tensor | None = None) -> Index:
        """Where the next tokens (B, T) stand: each row goes on from its own last position.

        Args:
            tokens: token ids, (B, T).
            valid: (B, T) bool, False for padding, which takes no position; None if nothing is padding.
        """
        length, seen = tokens.shape[1], self.placement.first(self._length)
        if valid is None and seen.plain:
            steps_T = torch.arange(self._length, self._length + length, device=self.device)
            self._placed = Index(steps_T[None], plain=self._length == 0)
        else:
            valid = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
            past_B1 = self._length if seen.valid is None else seen.valid.sum(dim=1, keepdim=True)
            self._placed = Index((past_B1 + valid.cumsum(dim=1) - 1).clamp(min=0), valid)
        return self._placed

    def begin(self, new: Index) -> None:
        """Open a pass over `new` tokens.

        Raises:
            UserError: there is no memory for them.
        """
        total = self._length + len(new)
        self.reserve(total)
        goes_on = new.plain if self._length == 0 else new is self._placed and new.valid is None
        if not (self.placement.plain and goes_on):
            self.placement.write(self._length, new)
        self._new, self._full = new, self.placement.first(total)
        self._rings = {window: self._ring(window, total) for window in self._windows}

    def append(self, layer: int, name: str, new: Tensor) -> History:
        """Add the entries (B, T, heads, dim) of this pass and give all that are stored, new ones among them.

        Of a slot with a window, T may be the last tokens of the pass only, as many as the window keeps.
        """
        assert self._new is not None
        if new.shape[0] != self.batch:
            raise ValueError(f"a cache of {self.batch} rows was given {new.shape[0]} by a pass")
        entries = self._slots[layer, name]
        window, start, total = entries.slot.window, self._length, self._length + len(self._new)
        if window is None or total <= entries.room:
            entries.put(slice(start, total), new)
            return History(entries.get(total, new.dtype), self._full, window)
        if len(self._new) == 1:
            place = start % window
            entries.put(slice(place, place + 1), new)
            return History(entries.get(window, new.dtype), self._rings[window], window)
        # The first queries of the pass see what the last ones push out of the ring, so they get both.
        used, count = min(start, window), new.shape[1]
        values = torch.cat((entries.get(used, new.dtype), new), dim=1)
        columns = torch.cat((ring_columns(window, start, self.device), self._columns(total - count, total)))
        kept = min(count, window)
        entries.put(self._columns(total - kept, total) % window, new[:, -kept:])
        self._passing[layer, name] = self.placement.at(columns)
        return History(values, self._passing[layer, name], window)

    def index(self, layer: int, name: str) -> Index:
        """Where the entries of a slot stand, in the order of its history."""
        window = self.layout.slot(layer, name).window
        if (layer, name) in self._passing:
            return self._passing[layer, name]
        return self._full if window is None else self._rings[window]

    def full_index(self) -> Index:
        """Where all tokens so far stand, this pass's included."""
        return self._full

    def advance(self) -> None:
        """Close the pass, after the last layer: every slot's length advances together."""
        self._length = len(self._full)
        self._new = None
        self._passing.clear()

    def entries(self, layer: int, name: str) -> History:
        """What is stored of a slot, in its dtype; a ring in the order of its places."""
        entries = self._slots[layer, name]
        values = entries.get(self._used(entries), entries.memory.dtype)
        return History(values, self.index(layer, name), entries.slot.window)

    def reset(self) -> None:
        """Forget all tokens and keep the memory."""
        self._length = 0
        self.placement = Placement(self.batch, self.device)
        self.placement.reserve(self.capacity)
        self._look_again()

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows, in this order; any number of them, each any number of times.

        Args:
            rows: int64, which row to take for each new one.
        """
        for key, entries in self._slots.items():
            self._slots[key] = entries.rows(rows, self._used(entries))
        self.placement.take_rows(rows)
        self.batch = len(rows)
        self._look_again()

    def fork(self, n: int) -> "Cache":
        """A copy with each row `n` times, side by side, that goes on by itself."""
        other = copy(self)
        other._slots, other.placement, other._passing = dict(self._slots), copy(self.placement), {}
        other.reorder(torch.arange(self.batch, device=self.device).repeat_interleave(n))
        return other

    def restore(self, index: Index, values: Mapping[tuple[int, str], Tensor]) -> None:
        """Hold what `entries` gave for every slot of a cache that had passed over the tokens of `index`, alone.

        Raises:
            UserError: there is no memory for them.
        """
        self.reset()
        self.begin(index)
        for key, entries in self._slots.items():
            entries.put(slice(0, values[key].shape[1]), values[key])
        self.advance()

    def save(self, path: str | Path) -> None:
        """Write it to one safetensors file, to be loaded for the same layout."""
        from kvpath.inference.cache_file import save_cache

        save_cache(self, Path(path))

    @classmethod
    def load(cls, path: str | Path, layout: Layout, device: torch.device | str = "cpu") -> "Cache":
        """Read what `save` wrote.

        Raises:
            UserError: the file is damaged, of another format version, or of another layout.
        """
        from kvpath.inference.cache_file import load_cache

        return load_cache(Path(path), layout, device)

    def _used(self, entries: Entries) -> int:
        return min(self._length, entries.room)

    def _look_again(self) -> None:
        self._placed, self._full = None, self.placement.first(self._length)
        self._rings = {window: self._ring(window, self._length) for window in self._windows}

    def _ring(self, window: int, total: int) -> Index:
        """Where the entries of a ring stand once `total` tokens went through it."""
        return self._full if total <= window else self.placement.at(ring_columns(window, total, self.device))

    def _columns(self, start: int, end: int) -> Tensor:
        return torch.arange(start, end, device=self.device)


def ring_columns(window: int, total: int, device: torch.device | str = "cpu") -> Tensor:
    """Which token stands at each place of a ring through which `total` tokens went: token t stands at t % window.

    >>> ring_columns(4, 6).tolist()
    [4, 5, 2, 3]
    """
    places = torch.arange(min(window, total), device=device)
    return places + window * torch.div(total - 1 - places, window, rounding_mode="floor")
