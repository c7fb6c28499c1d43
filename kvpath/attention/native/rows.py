"""Norms and rotations of a few rows on a CPU, compiled: torch takes several operations for each, and no arithmetic."""

import torch
from torch import Tensor, nn

from kvpath.attention.native.build import library

MOST_ELEMENTS = 2**15
"""Beyond it torch has more threads, and the number of operations does not matter."""

MOST_DIM = 16384

DTYPES = (torch.float32, torch.bfloat16)
"""That compiled functions take."""


def takes(x: Tensor) -> bool:
    """Whether `norm` and `rotate` can do it."""
    return (
        x.numel() <= MOST_ELEMENTS
        and x.device.type == "cpu"
        and x.dtype in DTYPES
        and x.shape[-1] <= MOST_DIM
        and x.stride(-1) == 1
        and type(x) in (Tensor, nn.Parameter)  # and not one without memory
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and library() is not None
    )


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension.

    Args:
        x: (..., D), as `takes` takes it.
        weight: (D,), dense, of the same dtype.
        eps: added to the mean square.
    """
    functions = library()
    assert functions is not None
    dim = x.shape[-1]
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    narrow = x.dtype == torch.bfloat16
    functions.kvpath_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // dim, dim, eps, narrow)
    return out


def rotate(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Every pair of features turned by its token's angles.

    Args:
        x_BTHD: as `takes` takes it.
        cos: (B or 1, T, 1, D / 2), float32.
        sin: the same.
    """
    functions = library()
    assert functions is not None
    batch, tokens, heads, dim = x_BTHD.shape
    row, token, head, _ = x_BTHD.stride()
    out = torch.empty(x_BTHD.shape, dtype=x_BTHD.dtype)
    functions.kvpath_rotate(
        x_BTHD.data_ptr(), row, token, head, *_angles(cos, tokens), *_angles(sin, tokens), out.data_ptr(),
        batch, tokens, heads, dim, x_BTHD.dtype == torch.bfloat16,
    )  # fmt: skip
    return out


def _angles(part: Tensor, tokens: int) -> tuple[int, int, int]:
    """Where they lie, and steps from row to row and from token to token: 0 where all share one."""
    if part.stride(-1) != 1:
        raise ValueError(f"angles must lie side by side, got strides {part.stride()}")
    row, token = part.stride(0), part.stride(1)
    return part.data_ptr(), 0 if part.shape[0] == 1 else row, 0 if part.shape[1] < tokens else token
