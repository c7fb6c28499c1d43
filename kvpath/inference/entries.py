"""The memory of one slot.

It is laid out as (B, heads, S, dim), so that a head's keys lie in one piece whatever the number of heads: measured in
decoding over several thousand tokens, the fused product and matrix products run up to twice, and never much less than
once, as fast as over (B, S, heads, dim). The contract's (B, S, heads, dim) is a view of it.
"""

import torch
from torch import Tensor

from kvpath.analysis.allocation import kept_tokens
from kvpath.attention.layout import Slot


class Entries:
    """A slot's entries for all rows. The only place that knows their order in memory and their dtype.

    A dtype other than that of the computation is converted here, on the way in and, for all entries, on the way out.
    """

    def __init__(self, slot: Slot, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.slot = slot
        self.memory = torch.empty(
            (batch, slot.heads, kept_tokens(slot, capacity), slot.dim), dtype=dtype, device=device
        )

    @property
    def room(self) -> int:
        """Entries that fit, for each row."""
        return self.memory.shape[2]

    def put(self, where: slice | Tensor, new_BTHD: Tensor) -> None:
        """Write entries to a range of places, or to the places of an int64 tensor. No gradient goes through."""
        new_BHTD = new_BTHD.detach().transpose(1, 2).to(self.memory.dtype)
        if isinstance(where, slice):
            self.memory[:, :, where] = new_BHTD
        else:
            self.memory.index_copy_(2, where, new_BHTD)

    def get(self, count: int, dtype: torch.dtype) -> Tensor:
        """The first `count` places, (B, S, heads, dim): a view if they are stored in `dtype`."""
        return self.memory[:, :, :count].transpose(1, 2).to(dtype)

    def resized(self, capacity: int, used: int) -> "Entries":
        """The same entries, of which `used` are written, with room for another capacity."""
        batch = self.memory.shape[0]
        grown = Entries(self.slot, batch, capacity, self.memory.dtype, self.memory.device)
        grown.memory[:, :, :used] = self.memory[:, :, :used]
        return grown

    def rows(self, rows: Tensor, used: int) -> "Entries":
        """A copy that holds these rows, in this order."""
        taken = Entries(self.slot, len(rows), self.room, self.memory.dtype, self.memory.device)
        taken.memory[:, :, :used] = self.memory[:, :, :used].index_select(0, rows)
        return taken
