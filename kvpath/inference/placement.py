"""Where the tokens in a cache stand."""

import torch
from torch import Tensor

from kvpath.attention.context import Index


class Placement:
    """Positions, validity and documents of a cache's tokens, in memory for `capacity` of them.

    As long as every row holds positions 0, 1, 2, ... without padding it is plain, and one row of positions serves all.
    """

    def __init__(self, batch: int, device: torch.device | str) -> None:
        self.batch = batch
        self.plain = True
        self.positions = torch.empty(1, 0, dtype=torch.int64, device=device)
        self.valid: Tensor | None = None
        self.documents: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that is allocated, by name."""
        parts = {"positions": self.positions, "valid": self.valid, "documents": self.documents}
        return {name: part for name, part in parts.items() if part is not None}

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` tokens."""
        if self.plain:
            self.positions = torch.arange(capacity, device=self.positions.device)[None]
            return
        for name, old in self.tensors.items():
            grown = old.new_empty(old.shape[0], capacity)
            grown[:, : old.shape[1]] = old
            setattr(self, name, grown)

    def write(self, start: int, new: Index) -> None:
        """Take in tokens that make it not plain, from column `start` on."""
        end = start + len(new)
        if self.plain:
            self.positions = self.positions.expand(self.batch, -1).clone()
            self.plain = False
        self.positions[:, start:end] = new.positions
        if new.valid is not None and self.valid is None:
            self.valid = torch.ones_like(self.positions, dtype=torch.bool)
        if self.valid is not None:
            self.valid[:, start:end] = True if new.valid is None else new.valid
        if new.documents is not None and self.documents is None:
            self.documents = torch.zeros_like(self.positions)
        if self.documents is not None:
            self.documents[:, start:end] = 0 if new.documents is None else new.documents

    def first(self, count: int) -> Index:
        """The first `count` tokens, as views."""
        valid, documents = (None if part is None else part[:, :count] for part in (self.valid, self.documents))
        return Index(self.positions[:, :count], valid, documents, plain=self.plain)

    def at(self, columns: Tensor) -> Index:
        """The tokens in these columns, in this order."""
        valid, documents = (None if part is None else part[:, columns] for part in (self.valid, self.documents))
        return Index(self.positions[:, columns], valid, documents)

    def take_rows(self, rows: Tensor) -> None:
        """Keep these rows, in this order, new tensors for all."""
        self.batch = len(rows)
        for name, old in self.tensors.items():
            setattr(self, name, old.clone() if self.plain else old.index_select(0, rows))
