import pytest
import torch
from torch.testing import assert_close

from kvpath.model.layers import RMSNorm, SwiGLU


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm_is_rounded_once(dtype: torch.dtype) -> None:
    norm = RMSNorm(7, eps=1e-2).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, 7))
    x = torch.randn(3, 7).to(dtype)
    wide, gain = x.double(), norm.weight.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-2).sqrt() * gain
    eps = torch.finfo(dtype).eps
    assert norm(x).dtype == dtype
    # One rounding of the normalised values, one of the result.
    assert_close(norm(x).double(), expected, rtol=1.1 * eps, atol=1e-12 if dtype == torch.float64 else 1e-7)


def test_swiglu() -> None:
    mlp = SwiGLU(3, 5, init_std=0.5).double()
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    gate, up = x @ mlp.w_gate.weight.T, x @ mlp.w_up.weight.T
    assert_close(mlp(x), (gate * torch.sigmoid(gate) * up) @ mlp.w_down.weight.T, atol=1e-12, rtol=0)
    assert [name for name, _ in mlp.named_parameters()] == ["w_gate.weight", "w_up.weight", "w_down.weight"]
