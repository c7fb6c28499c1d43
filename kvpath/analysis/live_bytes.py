"""The memory that tensors hold while operations run, on any device: a real one, meta, or fake tensors."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that operations make while it is entered, as long as anything holds them.

    What was there before does not count; nor does the workspace of a kernel, which is no tensor.

    Args:
        device: the type of device whose storages count, such as cpu; None for all, those without memory too.

    >>> import torch
    >>> with LiveBytes() as live:
    ...     _ = torch.zeros(2, dtype=torch.float32) + 1
    >>> live.peak
    16
    """

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.device = device
        self.peak = 0
        """The most bytes held at once."""
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def now(self) -> int:
        """Bytes held."""
        self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
        return sum(size for _, size in self._made.values())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and look at what it made."""
        out = func(*args, **(kwargs or {}))
        made = [x.untyped_storage() for x in tree_iter(out) if isinstance(x, Tensor) and self._counts(x)]
        if made:
            given = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
            new = {storage._cdata: storage for storage in made if storage._cdata not in given}
            self._made.update({key: (StorageWeakRef(storage), storage.nbytes()) for key, storage in new.items()})
            self.peak = max(self.peak, self.now)
        return out

    def _counts(self, tensor: Tensor) -> bool:
        return self.device is None or tensor.device.type == self.device
