"""Compiled norms and rotations against plain ones in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvpath.attention.native import build, rows
from kvpath.attention.rotary import rotary_angles, rotate
from kvpath.model.layers import RMSNorm

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
"""Of a result that is rounded once, relative."""

pytestmark = pytest.mark.skipif(build.library() is None, reason="there is no C compiler")


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", [(1, 1, 512), (3, 1, 7), (2, 5, 33), (1, 1)])
def test_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, gain = 3 * drawn(*shape, dtype=dtype), drawn(shape[-1], dtype=dtype)
    found = rows.norm(x, gain, 1e-5)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain.double()
    assert (found.dtype, found.shape) == (dtype, x.shape)
    torch.testing.assert_close(found.double(), expected, rtol=ROUNDING[dtype], atol=1e-30)


def test_norm_of_rows_that_lie_apart_and_of_zeros() -> None:
    x = drawn(2, 6, 16, dtype=torch.float32)[:, ::2]
    gain = torch.ones(16)
    torch.testing.assert_close(rows.norm(x, gain, 1e-5), torch.nn.functional.rms_norm(x, (16,), gain, 1e-5))
    assert not rows.norm(torch.zeros(1, 16), gain, 1e-5).any()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("batch", "own_positions"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 8, 64), (2, 3, 6), (5, 1, 2)])
def test_rotate(dtype: torch.dtype, batch: int, own_positions: bool, tokens: int, heads: int, dim: int) -> None:
    positions = torch.arange(9 * batch).view(batch, 9) if own_positions else torch.arange(1000, 1009)[None]
    cos, sin = (part[:, -tokens:] for part in rotary_angles(positions, dim, 10_000.0))
    x = drawn(batch, tokens, heads, dim + 3, dtype=dtype)[..., 1 : dim + 1]
    found = rows.rotate(x, cos, sin)
    first, second = x.double().chunk(2, dim=-1)
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    assert (found.dtype, found.shape) == (dtype, x.shape)
    # Where two products cancel, what is left is as exact as they are.
    torch.testing.assert_close(found.double(), expected, rtol=ROUNDING[dtype], atol=1e-6)


def test_a_bfloat16_is_rounded_to_the_nearest_and_what_is_no_number_stays_none() -> None:
    values = torch.tensor([1.0, 1.00390625, 1.01171875, -1.00390625, torch.inf, torch.nan, 3e38, 1e-40])
    cos, sin = values.view(1, 1, 1, -1), torch.zeros(1, 1, 1, len(values))
    ones = torch.ones(1, 1, 1, 2 * len(values), dtype=torch.bfloat16)
    found = rows.rotate(ones, cos, sin)[0, 0, 0, : len(values)]
    expected = (torch.ones(()) * values - torch.ones(()) * 0.0).bfloat16()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(1, 4, dtype=torch.float64),
        lambda: torch.zeros(1, 4, device="meta"),
        lambda: torch.zeros(rows.MOST_ELEMENTS + 1),
        lambda: torch.zeros(2, rows.MOST_DIM + 1)[:1],
        lambda: torch.zeros(4, 4).t(),
    ],
)
def test_what_it_cannot_do_is_left_to_torch(make: Callable[[], Tensor]) -> None:
    with torch.no_grad():
        assert rows.takes(torch.zeros(1, 4))
        assert not rows.takes(make())
    assert not rows.takes(torch.zeros(1, 4))  # there might be a gradient


def test_tensors_without_memory_are_left_to_torch() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.no_grad(), FakeTensorMode():
        assert not rows.takes(torch.zeros(1, 4))


@pytest.mark.parametrize("dtype", ROUNDING)
def test_modules_use_it_without_gradients_and_give_what_they_give_with(dtype: torch.dtype) -> None:
    norm = RMSNorm(24, 1e-5).to(dtype)
    x = drawn(2, 1, 3, 24, dtype=dtype)
    angles = rotary_angles(torch.tensor([[5]]), 24, 100.0)
    with torch.no_grad():
        found = norm(x), rotate(x, angles)
    for one, other in zip(found, (norm(x), rotate(x, angles)), strict=True):
        torch.testing.assert_close(one, other, rtol=2 * ROUNDING[dtype], atol=1e-6)
