"""What a training step holds beyond weights, gradients and moments: found by running it on tensors without memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvpath.analysis.live_bytes import LiveBytes
from kvpath.model.config import BackboneConfig
from kvpath.model.decoder import Decoder
from kvpath.model.loss import LossSums


def pass_bytes(
    config: BackboneConfig,
    sequences: int,
    seq_len: int,
    *,
    weights: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    activation_checkpointing: bool = False,
    gradients_held: bool = False,
) -> int:
    """The most bytes that one micro-batch holds at once beside the weights, in its forward and backward pass.

    Found by running them on fake tensors: every operation of the model, and no arithmetic.

    Args:
        config: the model.
        sequences: of a micro-batch.
        seq_len: tokens in each.
        weights: their dtype, which is that of their gradients too.
        autocast: the dtype of products where it is another one; copies of the weights in it are held and count.
        activation_checkpointing: whether blocks are run again in the backward pass instead of kept.
        gradients_held: whether gradients of earlier micro-batches are there, which do not count; else those that the
            pass makes on its way do.
    """
    with FakeTensorMode(), _made_in(weights):
        model = Decoder(config)
        model.activation_checkpointing = activation_checkpointing
        if gradients_held:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        tokens_BT = torch.zeros(sequences, seq_len, dtype=torch.int64)
        with LiveBytes() as live, torch.autocast("cpu", autocast, enabled=autocast is not None):
            sums = model(tokens_BT, tokens_BT)
            assert isinstance(sums, LossSums)
            (sums.total * 1.0).backward()
        return live.peak


@contextmanager
def _made_in(dtype: torch.dtype) -> Iterator[None]:
    """Fake parameters cannot be cast."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
