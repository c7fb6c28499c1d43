"""A linear layer with a matrix of its own for each head."""

import torch
from torch import Tensor, nn


class PerHeadLinear(nn.Module):
    """y_h = W_h x_h for each head h, without bias, weights drawn from normal(0, init_std)."""

    def __init__(self, n_heads: int, n_in: int, n_out: int, init_std: float) -> None:
        super().__init__()
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(n_heads, n_out, n_in))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew."""
        nn.init.normal_(self.weight, std=self.init_std)

    def matmul_flops_per_token(self) -> int:
        """FLOPs of the matrix products for one token, all heads; a multiply-add is two."""
        return 2 * self.weight.numel()

    def forward(self, x_BSHD: Tensor) -> Tensor:
        """(B, S, H, n_in) to (B, S, H, n_out)."""
        return torch.einsum("bshi,hoi->bsho", x_BSHD, self.weight)
