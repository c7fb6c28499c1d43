"""The product, against loops over queries and keys (float64)."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kvpath.attention import Context, History, Index, Segment, attend, product
from tests.attention.reference import attention, sees
from tests.cases import SHIPPED

LAYOUT = SHIPPED[0].config().layout()


@pytest.fixture(params=["shared by the kernel", "spread before"], autouse=True)
def heads_that_share_keys(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CPUs, and as with masks on GPUs."""
    if request.param == "spread before":
        monkeypatch.setattr(product, "_kernel_shares_heads", lambda q_BHTD, mask: mask is None)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def spread(x_BSGD: Tensor, heads: int) -> Tensor:
    """Each head of `x` as often as needed for `heads`."""
    shares = heads // x_BSGD.shape[2]
    return torch.stack([x_BSGD[:, :, head // shares] for head in range(heads)], dim=2)


def assert_same(found: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    """Values and the gradients of all inputs."""
    assert_close(found, expected, atol=1e-10, rtol=0)
    weight = torch.randn_like(found)
    for mine, theirs in zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        assert_close(mine, theirs, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(1, 1), (6, 1), (6, 2), (6, 6)])
@pytest.mark.parametrize(("qk_dim", "v_dim"), [(5, 5), (7, 3), (3, 7)])
@pytest.mark.parametrize("window", [None, 2])
def test_heads_and_widths(n_heads: int, n_kv_heads: int, qk_dim: int, v_dim: int, window: int | None) -> None:
    q, k, v = draw(2, 5, n_heads, qk_dim), draw(2, 5, n_kv_heads, qk_dim), draw(2, 5, n_kv_heads, v_dim)
    context = Context.of(LAYOUT, Index.start(5), 1e6)
    found = attend([q], [Segment((History(k, context.new, window),), (History(v, context.new, window),))], context)
    expected = torch.stack([attention(q[b], k[b], v[b], lambda t, s: sees(t, s, window)) for b in range(2)])
    assert_same(found, expected, q, k, v)


@pytest.mark.parametrize("heads", [(4, 1, 2), (1, 4, 1), (2, 2, 4), (1, 1, 1)])
def test_parts_with_heads_of_their_own(heads: tuple[int, int, int]) -> None:
    first, second, values = heads
    most = max(heads)
    q_parts = [draw(2, 5, 4, 3), draw(2, 5, 4, 2)]
    k_parts, v_parts = [draw(2, 5, first, 3), draw(2, 5, second, 2)], [draw(2, 5, values, 4), draw(2, 5, first, 1)]
    context = Context.of(LAYOUT, Index.start(5), 1e6)

    def history(x: Tensor) -> History:
        return History(x, context.new)

    found = attend(q_parts, [Segment(tuple(map(history, k_parts)), tuple(map(history, v_parts)))], context)
    q = torch.cat(q_parts, dim=-1)
    k, v = (torch.cat([spread(part, most) for part in parts], dim=-1) for parts in (k_parts, v_parts))
    expected = torch.stack([attention(q[b], k[b], v[b]) for b in range(2)])
    assert_same(found, expected, *q_parts, *k_parts, *v_parts)


@pytest.mark.parametrize("n_queries", [5, 3, 1])
@pytest.mark.parametrize("windows", [(None, 2), (2, None), (3, 1), (None, None)], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (1, 4), (4, 2)], ids=str)
def test_segments_stand_in_one_softmax(
    n_queries: int, windows: tuple[int | None, int | None], heads: tuple[int, int]
) -> None:
    q = draw(2, n_queries, 4, 3)
    keys, values = [draw(2, 5, count, 3) for count in heads], [draw(2, 5, count, 2) for count in heads]
    context = Context.of(LAYOUT, Index.start(5), 1e6)
    segments = [
        Segment((History(k, context.new, window),), (History(v, context.new, window),))
        for k, v, window in zip(keys, values, windows, strict=True)
    ]
    found = attend([q], segments, context)
    k, v = (torch.cat([spread(part, 4) for part in parts], dim=1) for parts in (keys, values))

    def visible(query: int, entry: int) -> bool:
        return sees(query + 5 - n_queries, entry % 5, windows[entry // 5])

    expected = torch.stack([attention(q[b], k[b], v[b], visible) for b in range(2)])
    assert_same(found, expected, q, *keys, *values)


@pytest.mark.parametrize("n_segments", [1, 2])
def test_a_query_that_sees_no_key_gives_zeros_and_finite_gradients(n_segments: int) -> None:
    valid = torch.tensor([[False, False, True, True], [False] * 4])
    context = Context.of(LAYOUT, Index(torch.tensor([[1, 1, 2, 3], [0] * 4]), valid), 1e6)
    q, k, v = draw(2, 4, 2, 3), draw(2, 4, 1, 3), draw(2, 4, 1, 3)
    segment = Segment((History(k, context.new),), (History(v, context.new),))
    out = attend([q], [segment] * n_segments, context)
    assert (out[0, :2] == 0).all()
    assert (out[1] == 0).all()
    assert (out[0, 2:] != 0).all()
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all((gradient[1] == 0).all() for gradient in gradients)
    assert (gradients[1][0, :2] == 0).all()


def test_what_is_not_seen_changes_nothing_even_if_it_is_huge() -> None:
    context = Context.of(LAYOUT, Index.start(4), 1e6)
    q, k, v = draw(1, 4, 1, 3), draw(1, 4, 1, 3), draw(1, 4, 1, 3)

    def out(scale: float) -> Tensor:
        grown = [torch.cat((x[:, :3], x[:, 3:] * scale), dim=1) for x in (k, v)]
        return attend([q], [Segment((History(grown[0], context.new),), (History(grown[1], context.new),))], context)

    assert torch.equal(out(1.0)[:, :3], out(1e100)[:, :3])
