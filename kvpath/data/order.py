"""The order of training windows: a shuffle that is computed, never stored."""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_GOLDEN, _FIRST, _SECOND = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)
_27, _30, _31 = np.array([27, 30, 31], dtype=np.uint64)


class Order:
    """A permutation of ``n`` windows per epoch, a pure function of seed, epoch and position.

    A keyed Feistel network permutes the smallest 4^k numbers that hold ``n``; a result of ``n`` or more is sent through
    again until it is below. So any position costs the same, and nothing is kept.

    Args:
        n: number of windows, at least 1.
        seed: another seed, another order.
    """

    def __init__(self, n: int, seed: int) -> None:
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        self.n = n
        self._seed = np.array([seed % 2**64], dtype=np.uint64)
        self._half_bits = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))

    def index(self, position: NDArray[np.integer]) -> NDArray[np.int64]:
        """The windows at these positions of the endless stream: epoch ``position // n``, place ``position % n``.

        Args:
            position: any shape, not negative.

        Returns:
            windows in [0, n), of the same shape.
        """
        epoch, place = np.divmod(position.astype(np.int64).ravel(), self.n)
        epochs, which = np.unique(epoch, return_inverse=True)
        keys = self._keys(epochs.astype(np.uint64))
        found = self._permute(place.astype(np.uint64), keys[:, which])
        while (outside := np.flatnonzero(found >= self.n)).size:
            found[outside] = self._permute(found[outside], keys[:, which[outside]])
        return found.astype(np.int64).reshape(position.shape)

    def _keys(self, epochs: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Of each round and epoch."""
        keys = [mix(mix(self._seed) ^ epochs)]
        for _ in range(_ROUNDS):
            keys.append(mix(keys[-1]))
        return np.stack(keys[1:])

    def _permute(self, place: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
        mask = (np.uint64(1) << self._half_bits) - np.uint64(1)
        left, right = place >> self._half_bits, place & mask
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & mask)
        return (left << self._half_bits) | right


class BlockOrder:
    """Windows in shuffled blocks of a fixed number of tokens: the same stream of tokens at every context length.

    Within a block windows follow each other. Windows beyond the last whole block are left out.

    Args:
        n_windows: number of windows of the corpus.
        per_block: windows in a block, at least 1; 1 shuffles windows.
        seed: another seed, another order.
        start: windows at the front of the stream that are passed over.
    """

    def __init__(self, n_windows: int, per_block: int, seed: int, start: int = 0) -> None:
        self._blocks, self._per_block, self._start = Order(n_windows // per_block, seed), per_block, start

    @property
    def n(self) -> int:
        """Windows in an epoch."""
        return self._blocks.n * self._per_block

    def index(self, position: NDArray[np.integer]) -> NDArray[np.int64]:
        """The windows at these positions, counted from where the stream starts; of the same shape."""
        block, place = np.divmod(position.astype(np.int64) + self._start, self._per_block)
        return self._blocks.index(block) * self._per_block + place

    def epoch(self, position: int) -> int:
        """The epoch of the window at this position, from 0."""
        return (position + self._start) // self.n


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter 64 bits over 64 bits, one to one (the finaliser of splitmix64)."""
    x = x + _GOLDEN
    x = (x ^ (x >> _30)) * _FIRST
    x = (x ^ (x >> _27)) * _SECOND
    return x ^ (x >> _31)
