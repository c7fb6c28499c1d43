"""Which tokens a run was trained on: a hash of them all, and where each lane of a stream stands."""

from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvpath.data.order import mix

_KEPT = 3
"""The loader is ahead of the step that was trained by one, and a checkpoint may be written before the step begins."""


class _Mark(NamedTuple):
    digest: int
    places_L5: Tensor | None


class StreamRecord:
    """What was taken from the training data before each of the last few steps, on this rank.

    The hash is a sum over all sequences so far of a mix of their tokens and of their place in the global order. So it
    tells any two orders apart, each rank sums its own, and neither micro-batches nor workers matter.

    Args:
        step: steps that an earlier attempt did.
        stream_hash: of those, over all ranks; None if that is not known.
        places_L5: where each lane of this rank stands (see `kvpath.data.lanes`), if there are lanes.
    """

    def __init__(self, step: int = 0, stream_hash: int | None = 0, places_L5: Tensor | None = None) -> None:
        self._before = stream_hash
        self._marks = {step: _Mark(0, places_L5)}
        self._step = step

    @classmethod
    def from_state(cls, state: dict[str, Any], places_L5: Tensor | None) -> Self:
        """Go on from a checkpoint; one that has no hash leaves it unknown."""
        known = state.get("stream_hash")
        return cls(state.get("step", 0), None if known is None else int(known, 16), places_L5)

    def begin(self, step: int) -> None:
        """The next batch is that of ``step``. Without knowledge of those before, there will be no hash."""
        if step not in self._marks:
            self._before, self._marks = None, {step: _Mark(0, None)}
        self._step = step

    def add(self, tokens_NT: NDArray[np.int64], places_N: NDArray[np.int64], places_L5: Tensor | None = None) -> None:
        """Count this rank's sequences of the next step.

        Args:
            tokens_NT: their tokens.
            places_N: their places in the global order.
            places_L5: where each lane of this rank stands after it.
        """
        digest = self._marks[self._step].digest + stream_digest(tokens_NT, places_N)
        self._step += 1
        self._marks[self._step] = _Mark(digest % 2**64, places_L5)
        self._marks = {step: mark for step, mark in self._marks.items() if self._step - step < _KEPT}

    def places(self, step: int) -> Tensor | None:
        """Where each lane of this rank stands before ``step``; None if that is not known."""
        mark = self._marks.get(step)
        return None if mark is None else mark.places_L5

    def own_hash(self, step: int, rank: int) -> Tensor | None:
        """This rank's share, int64: the hash of all tokens before ``step`` is the sum over ranks, modulo 2^64."""
        mark = self._marks.get(step)
        if mark is None or self._before is None:
            return None
        share = mark.digest + (self._before if rank == 0 else 0)
        return torch.from_numpy(np.array(share % 2**64, dtype=np.uint64).view(np.int64))


def as_hex(total: Tensor) -> str:
    """A hash as people see it."""
    return f"{total.item() % 2**64:016x}"


def stream_digest(tokens_NT: NDArray[np.int64], places_N: NDArray[np.int64]) -> int:
    """The summand of some sequences, modulo 2^64."""
    keys_T, sum_of_keys = _keys(tokens_NT.shape[-1])
    # each token plus one, times its key; einsum takes half the time of a product of integer matrices
    folded_N = np.einsum("nt,t->n", tokens_NT.view(np.uint64), keys_T) + sum_of_keys
    mixed_2N = mix(np.stack([folded_N, places_N.astype(np.uint64)]))
    return int(mix(mixed_2N[0] ^ mixed_2N[1]).sum(dtype=np.uint64))


@lru_cache(maxsize=8)
def _keys(length: int) -> tuple[NDArray[np.uint64], np.uint64]:
    """A factor for each place of a sequence, and their sum modulo 2^64."""
    keys_T = mix(np.arange(length, dtype=np.uint64)) | np.uint64(1)
    return keys_T, keys_T.sum(dtype=np.uint64)
