"""The memory that a cache takes, from the layout alone."""

from collections.abc import Mapping

import torch

from kvpath.attention.layout import Layout, Slot

BLOCK = 256
"""Tokens by which caches grow."""

POSITION_BYTES = torch.int64.itemsize
VALIDITY_BYTES = torch.bool.itemsize


def whole_blocks(tokens: int, block: int = BLOCK) -> int:
    """The least multiple of `block` that holds so many tokens."""
    return -(-tokens // block) * block


def kept_tokens(slot: Slot, capacity: int) -> int:
    """Entries for which a slot has room: a window is a ring and never holds more than itself."""
    return capacity if slot.window is None else min(slot.window, capacity)


def cache_bytes(
    layout: Layout,
    batch: int,
    tokens: int,
    dtype: torch.dtype,
    slot_dtypes: Mapping[str, torch.dtype] | None = None,
    *,
    padded: bool = False,
    block: int = BLOCK,
) -> int:
    """Bytes that `kvpath.inference.Cache` allocates, its positions included.

    Args:
        layout: the layout, of which all cached slots count.
        batch: rows.
        tokens: tokens of each row; rounded up to whole blocks.
        dtype: of all slots but those in `slot_dtypes`.
        slot_dtypes: by the slot's name.
        padded: whether rows are padded, so that each has positions and validity of its own.
        block: tokens to a block.
    """
    capacity, own = whole_blocks(tokens, block), slot_dtypes or {}
    entries = sum(
        kept_tokens(slot, capacity) * slot.elements * own.get(name, dtype).itemsize for _, name, slot in layout.cached()
    )
    places = batch * (POSITION_BYTES + VALIDITY_BYTES) if padded else POSITION_BYTES
    return batch * entries + places * capacity
