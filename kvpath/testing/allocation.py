"""The memory that tensors really take, whoever holds them."""

import gc

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from kvpath.analysis.allocation import cache_bytes
from kvpath.analysis.live_bytes import LiveBytes
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
    with LiveBytes() as live:
        model(step, store=cache)
    return taken, cache_bytes(model.layout, batch, TOKENS, dtype), live.peak


def bytes_beyond_the_layout(toy: Toy) -> float:
    """The share by which the memory that a cache really takes differs from what the layout says."""
    taken, stated, _ = decoded_bytes(toy)
    return abs(taken / stated - 1)
