"""The simplest cache: every stored slot grows by concatenation. What `kvpath.inference.Cache` is compared with."""

import torch
from torch import Tensor

from kvpath.attention.context import History, Index
from kvpath.attention.layout import Layout


class GrowingCache:
    """Keys and values of earlier tokens, as the layout stores them; simple, and the reference for faster ones.

    Rows may be padded on the left: positions and validity are kept per row. A slot with a window keeps its last
    `window` entries.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._slots: dict[tuple[int, str], tuple[Tensor, Index]] = {}
        self._passed: Index | None = None
        self._new: Index | None = None
        self._full: Index | None = None

    def __len__(self) -> int:
        """Tokens of each row so far, padding included."""
        return 0 if self._passed is None else len(self._passed)

    @property
    def elements(self) -> int:
        """Elements stored now, over all rows."""
        return sum(values.numel() for values, _ in self._slots.values())

    def place(self, tokens: Tensor, valid: Tensor | None = None) -> Index:
        """Where the next tokens (B, T) stand: each row goes on from its own last position.

        Args:
            tokens: token ids, (B, T).
            valid: (B, T) bool, False for padding, which takes no position; None if nothing is padding.
        """
        length = tokens.shape[1]
        if valid is None and (self._passed is None or self._passed.plain):
            steps = torch.arange(len(self), len(self) + length, device=tokens.device)
            return Index(steps[None], plain=len(self) == 0)
        if valid is None:
            valid = torch.ones_like(tokens, dtype=torch.bool)
        seen_B1 = torch.zeros_like(valid[:, :1], dtype=torch.int64)
        if self._passed is not None:
            seen_B1 = seen_B1 + (
                len(self) if self._passed.valid is None else self._passed.valid.sum(dim=1, keepdim=True)
            )
        return Index((seen_B1 + valid.cumsum(dim=1) - 1).clamp(min=0), valid)

    def begin(self, new: Index) -> None:
        """Open a pass over `new` tokens."""
        self._new, self._full = new, _join(self._passed, new)

    def append(self, layer: int, name: str, new: Tensor) -> History:
        """Add the entries (B, T, heads, dim) of this pass and give all that are stored, new ones last."""
        assert self._new is not None
        old = self._slots.get((layer, name))
        window = self.layout.slot(layer, name).window
        index = self.full_index() if window is None else self._new.last(new.shape[1])
        if old is not None:
            index = index if window is None else old[1].then(index)
            new = torch.cat((old[0], new), dim=1)
        self._slots[layer, name] = new, index
        return History(new, index, window)

    def entries(self, layer: int, name: str) -> History:
        """What is stored of a slot."""
        return History(*self._slots[layer, name], self.layout.slot(layer, name).window)

    def index(self, layer: int, name: str) -> Index:
        """Where the stored entries of a slot stand, this pass's included."""
        return self._slots[layer, name][1]

    def full_index(self) -> Index:
        """Where all tokens so far stand, this pass's included."""
        assert self._full is not None
        return self._full

    def advance(self) -> None:
        """Close the pass: lengths advance together, and windows drop what has left them."""
        self._passed, self._new = self._full, None
        for key, (values, index) in self._slots.items():
            window = self.layout.slot(*key).window
            if window is not None and len(index) > window:
                self._slots[key] = values[:, -window:].clone(), index.last(window)


def _join(old: Index | None, new: Index) -> Index:
    """All tokens so far; plain if they still are."""
    if old is None:
        return new
    if old.plain and new.valid is None and new.documents is None:
        return Index.start(len(old) + len(new), new.positions.device)
    return old.then(new)
