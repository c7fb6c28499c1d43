"""Rotary positions, paired as in the Llama family: feature i with feature i + dim / 2."""

import torch
from torch import Tensor

from kvpath.attention.native import rows

Angles = tuple[Tensor, Tensor]


def rotary_angles(positions_BT: Tensor, dim: int, base: float) -> Angles:
    """Cosines and sines of shape (B, T, 1, dim / 2), in float32 whatever the model's dtype.

    bfloat16 has only 769 distinct values below 4,096, so positions must never be rounded to it.
    """
    # Autocast leaves element-wise products alone, so it needs no switching off (and has no switch for the meta device).
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=positions_BT.device)
    frequencies = 1.0 / base ** (steps / dim)
    angles_BT1D = (positions_BT.float()[..., None] * frequencies)[:, :, None, :]
    return angles_BT1D.cos(), angles_BT1D.sin()


def rotate(x_BTHD: Tensor, angles: Angles) -> Tensor:
    """Rotate every pair of features of `x_BTHD` by its token's angles; computed in float32 or wider, rounded once."""
    if rows.takes(x_BTHD):
        return rows.rotate(x_BTHD, *angles)
    wide = torch.promote_types(x_BTHD.dtype, torch.float32)
    cos, sin = (part.to(wide) for part in angles)
    first, second = x_BTHD.to(wide).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHD.dtype)


def rotate_in_place(x_BTHD: Tensor, angles: Angles) -> None:
    """`rotate` where the result may overwrite `x_BTHD`, float32 or wider, and no gradient is wanted."""
    cos, sin = (part.to(x_BTHD.dtype) for part in angles)
    first, second = x_BTHD.chunk(2, dim=-1)
    before = first.clone()
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(before, sin)
