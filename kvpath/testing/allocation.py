"""The memory that tensors really take, whoever holds them."""

import gc
import weakref
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvpath.analysis.allocation import cache_bytes
from kvpath.inference.cache import Cache
from kvpath.testing.toys import Toy, tokens

TOKENS = 2048


def live_tensor_bytes() -> int:
    """Bytes of the storages of all tensors of this process, each storage once."""
    storages = [tensor.untyped_storage() for tensor in live_tensors()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def live_tensors() -> list[Tensor]:
    """All that have memory: those that a compiler traces with, and those on the meta device, have none."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    real = [tensor for tensor in found if not isinstance(tensor, FakeTensor | FunctionalTensor)]
    return [tensor for tensor in real if tensor.device.type != "meta"]


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made while it is entered held at once; the workspace of kernels is not seen.

    >>> with PeakBytes() as peak:
    ...     _ = torch.zeros(2, dtype=torch.float32) + 1
    >>> peak.bytes
    16
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._before: set[int] = set()
        self._made: list[weakref.ref[Tensor]] = []

    def __enter__(self) -> Self:
        """Note what is there already, which does not count."""
        self._before = {tensor.untyped_storage().data_ptr() for tensor in live_tensors()}
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop counting."""
        super().__exit__(kind, value, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at what it made."""
        out = func(*args, **(kwargs or {}))
        parts = out if isinstance(out, tuple | list) else [out]
        self._made += [weakref.ref(part) for part in parts if isinstance(part, Tensor)]
        self._made = [ref for ref in self._made if ref() is not None]
        storages = [tensor.untyped_storage() for ref in self._made if (tensor := ref()) is not None]
        sizes = {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in self._before}
        self.bytes = max(self.bytes, sum(sizes.values()))
        return out


@torch.no_grad()
def decoded_bytes(toy: Toy, dtype: torch.dtype = torch.float64, batch: int = 1) -> tuple[int, int, int]:
    """Decode a few tokens in a cache of whole blocks.

    Returns:
        The bytes of all live tensors after it less those before the cache was made; the bytes that the layout says;
        and the most that tensors made in one more step held at once.
    """
    model = toy.decoder(dtype)
    prompt, step = tokens(batch, 3), tokens(batch, 1)
    before = live_tensor_bytes()
    cache = Cache(model.layout, batch, TOKENS, dtype=dtype)
    model(prompt, store=cache)
    for _ in range(2):
        model(step, store=cache)
    taken = live_tensor_bytes() - before
    with PeakBytes() as peak:
        model(step, store=cache)
    return taken, cache_bytes(model.layout, batch, TOKENS, dtype), peak.bytes


def bytes_beyond_the_layout(toy: Toy) -> float:
    """The share by which the memory that a cache really takes differs from what the layout says."""
    taken, stated, _ = decoded_bytes(toy)
    return abs(taken / stated - 1)
