"""Layers that initialise themselves, so that deferred and sharded construction give the same statistics."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvpath.attention.native import rows


class Linear(nn.Linear):
    """A linear layer without bias, weights drawn from normal(0, init_std)."""

    def __init__(self, n_in: int, n_out: int, init_std: float) -> None:
        self.init_std = init_std
        super().__init__(n_in, n_out, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        nn.init.normal_(self.weight, std=self.init_std)


class Embedding(nn.Embedding):
    """An embedding table drawn from normal(0, init_std)."""

    def __init__(self, n_rows: int, dim: int, init_std: float) -> None:
        self.init_std = init_std
        super().__init__(n_rows, dim)

    def reset_parameters(self) -> None:
        """Draw the table anew."""
        nn.init.normal_(self.weight, std=self.init_std)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32 or wider."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gains to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and dtype as `x`."""
        weight = self.weight.to(x.dtype)
        if rows.takes(x):
            return rows.norm(x, weight, self.eps)
        return F.rms_norm(x, weight.shape, weight, self.eps)


class SwiGLU(nn.Module):
    """W_down(silu(W_gate x) * W_up x)."""

    def __init__(self, d_model: int, d_ff: int, init_std: float) -> None:
        super().__init__()
        self.w_gate = Linear(d_model, d_ff, init_std)
        self.w_up = Linear(d_model, d_ff, init_std)
        self.w_down = Linear(d_ff, d_model, init_std)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        return self.w_down(F.silu(self.w_gate(x_BTC)) * self.w_up(x_BTC))
