"""What a training step holds beyond weights, gradients and moments: found by running it on tensors without memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kvpath.analysis.live_bytes import LiveBytes
from kvpath.model.config import BackboneConfig
from kvpath.model.decoder import Decoder
from kvpath.model.loss import LossSums


@dataclass(frozen=True)
class Exchange:
    """Gradients leave in buckets, made with the first gradient; a rank makes room for its part of them when the first
    bucket is full (ZeRO 1 and 2).

    Args:
        bucket_elements: gradients in a bucket; one that is larger keeps its own memory.
        part_elements: this rank's part.
        buckets: how many there are.
    """

    bucket_elements: int
    part_elements: int
    buckets: int

    @property
    def elements(self) -> int:
        """Of all buckets."""
        return self.buckets * self.bucket_elements


def pass_bytes(
    config: BackboneConfig,
    sequences: int,
    seq_len: int,
    *,
    weights: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    activation_checkpointing: bool = False,
    gradients_held: bool = False,
    exchange: Exchange | None = None,
) -> int:
    """The most bytes that one micro-batch holds at once beside the weights, in its forward and backward pass.

    Found by running them on fake tensors: every operation of the model, and no arithmetic.

    Args:
        config: the model.
        sequences: of a micro-batch.
        seq_len: tokens in each.
        weights: their dtype, which is that of their gradients too.
        autocast: the dtype of products where it is another one; copies of the weights in it count as long as the
            backward pass needs them, and none is kept for a second use: so does the Trainer.
        activation_checkpointing: whether blocks are run again in the backward pass instead of kept.
        gradients_held: whether gradients of earlier micro-batches are there, which do not count; else those that the
            pass makes on its way do.
        exchange: how gradients leave during the backward pass, if they do; buckets and this rank's part count.
    """
    with FakeTensorMode(), _made_in(weights):
        model = Decoder(config)
        model.activation_checkpointing = activation_checkpointing
        if gradients_held:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        if exchange is not None:
            leaving = _Leaving(exchange)
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(leaving)
        tokens_BT = torch.zeros(sequences, seq_len, dtype=torch.int64)
        with LiveBytes() as live, _passes_in(autocast):
            sums = model(tokens_BT, tokens_BT)
            assert isinstance(sums, LossSums)
            (sums.total * 1.0).backward()
        return live.peak


@dataclass
class _Leaving:
    """A hook on every parameter, called when its gradient is there."""

    exchange: Exchange
    waiting: int = 0
    buckets: Tensor | None = None
    kept: list[Tensor] = field(default_factory=list)
    large: Tensor | None = None

    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        size = parameter.numel()
        if self.buckets is None:
            self.buckets = parameter.grad.new_empty(self.exchange.elements)
        if self.waiting + size > self.exchange.bucket_elements:
            parameter.grad.new_empty(min(self.waiting, self.exchange.bucket_elements))  # what is sent is a copy
            if not self.kept:
                self.kept.append(parameter.grad.new_empty(self.exchange.part_elements))
            self.waiting, self.large = 0, None
        self.waiting += size
        if size > self.exchange.bucket_elements:
            self.large = parameter.grad
        parameter.grad = None


def _passes_in(dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False)


@contextmanager
def _made_in(dtype: torch.dtype) -> Iterator[None]:
    """Fake parameters cannot be cast."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
