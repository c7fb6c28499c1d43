"""What a token sees, against loops over positions, and where entries stand."""

from itertools import product

import pytest
import torch
from torch import Tensor

from kvpath.attention import Context, Index
from kvpath.attention.context import visible
from kvpath.inference import Cache
from tests.attention.reference import sees
from tests.attention.strategies import WindowedGQA
from tests.cases import Case

LAYOUT = Case("", WindowedGQA(n_heads=1, n_kv_heads=1, head_dim=4, window=3), n_layers=2).config().layout()
"""Layer 0 has a window of 3, layer 1 none."""

DOCUMENTS = Index(
    torch.tensor([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]), documents=torch.tensor([[0] * 2 + [1] * 3 + [2], [0] * 6])
)
PADDED = Index(
    torch.tensor([[0, 0, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5], [0] * 6]),
    valid=torch.tensor([[False] * 3 + [True] * 3, [True] * 6, [False] * 6]),
)
INDICES = {
    "plain": Index.start(6),
    "offset": Index(torch.arange(4, 10)[None]),
    "documents": DOCUMENTS,
    "padded": PADDED,
}


def expected_mask(queries: Index, keys: Index, window: int | None) -> Tensor:
    """(B, T, S) by loops."""
    batch = max(queries.positions.shape[0], keys.positions.shape[0])

    def at(part: Tensor | None, row: int, token: int, default: int) -> int:
        return default if part is None else int(part.expand(batch, -1)[row, token])

    mask = torch.zeros(batch, len(queries), len(keys), dtype=torch.bool)
    for row, t, s in product(range(batch), range(len(queries)), range(len(keys))):
        mask[row, t, s] = (
            sees(at(queries.positions, row, t, 0), at(keys.positions, row, s, 0), window)
            and bool(at(keys.valid, row, s, 1))
            and at(queries.documents, row, t, 0) == at(keys.documents, row, s, 0)
        )
    return mask


def as_mask(found: tuple[Tensor | None, bool], n_queries: int, n_keys: int) -> Tensor:
    """What `visibility` says, as (B, T, S)."""
    mask, causal = found
    if mask is not None:
        assert not causal
        return mask[:, 0]
    whole = torch.ones(1, n_queries, n_keys, dtype=torch.bool)
    if causal:
        assert n_queries == n_keys, "a causal product is aligned at the top left"
        return whole.tril()
    return whole


@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("n_queries", [6, 4, 1])
def test_without_a_cache(index: Index, window: int | None, n_queries: int) -> None:
    context = Context.of(LAYOUT, index, 1e6)
    found = as_mask(context.visibility(n_queries, index, window), n_queries, 6)
    assert torch.equal(found, expected_mask(index.last(n_queries), index, window))


@pytest.mark.parametrize("layer", [0, 1], ids=["window", "no-window"])
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("sizes", [(1, 5), (4, 2), (2, 3, 1), (1, 1, 1, 1, 1, 1)], ids=str)
def test_chunks_on_a_cache_are_aligned_at_the_bottom_right(index: Index, sizes: tuple[int, ...], layer: int) -> None:
    window = LAYOUT.slot(layer, "k").window
    whole = expected_mask(index, index, window)
    cache, start = Cache(LAYOUT, len(whole), block=4), 0
    for size in sizes:
        part = slice(start, start + size)
        valid, documents = (None if row is None else row[:, part] for row in (index.valid, index.documents))
        new = cache.place(whole[:, part, 0]) if index.plain else Index(index.positions[:, part], valid, documents)
        cache.begin(new)
        context = Context.of(LAYOUT, new, 1e6, store=cache).at(layer)
        for name in ("k", "v"):
            numbers = torch.arange(start, start + size, dtype=torch.float32)
            history = context.append(name, numbers[None, :, None, None].expand(len(whole), -1, 1, 4))
        found = as_mask(context.visibility(size, history.index, history.window), size, len(history.index))
        stored = history.values[0, :, 0, 0].long()
        assert torch.equal(found.expand(len(whole), -1, -1), whole[:, part, stored])
        dropped = [token for token in range(start + size) if token not in stored.tolist()]
        assert not whole[:, part, dropped].any()
        cache.advance()
        start += size


def test_nothing_is_made_for_a_plain_causal_pass() -> None:
    context = Context.of(LAYOUT, Index.start(6), 1e6)
    assert context.masks[None] is None
    assert context.visibility(6, context.new, None) == (None, True)
    assert context.visibility(1, context.new, None) == (None, False)
    assert visible(context.new, context.new, 6) is None
    assert visible(context.new, context.new, 5) is not None


def test_masks_are_made_once_for_a_pass() -> None:
    context = Context.of(LAYOUT, DOCUMENTS, 1e6)
    for window in (None, 3):
        assert context.at(1).visibility(6, context.new, window)[0] is context.masks[window]


def test_append_without_a_store_is_the_identity() -> None:
    context = Context.of(LAYOUT, Index.start(6), 1e6)
    new = torch.randn(2, 6, 1, 4)
    history = context.append("k", new)
    assert history.values is new
    assert history.index is context.new
    assert history.window == 3


def test_entries_of_a_suffix_stand_at_the_end() -> None:
    context = Context.of(LAYOUT, Index.start(6), 1e6)
    assert context.append("k", torch.randn(2, 4, 1, 4)).index.positions.tolist() == [[2, 3, 4, 5]]


def test_queries_of_a_suffix_turn_by_their_own_positions() -> None:
    context = Context.of(LAYOUT, Index.start(6), 1e6)
    x = torch.randn(1, 6, 1, 4)
    assert torch.equal(context.rotate(x[:, -2:]), context.rotate(x)[:, -2:])
    assert not torch.equal(context.rotate(x[:, :2]), context.rotate(x)[:, :2])


def test_rotation_over_a_width_that_the_layout_does_not_name() -> None:
    context = Context.of(LAYOUT, Index.start(6), 1e6)
    x = torch.randn(1, 6, 1, 8)
    assert 8 not in context.angles
    assert torch.equal(context.rotate(x)[:, 0], x[:, 0])
    assert not torch.equal(context.rotate(x)[:, 1], x[:, 1])
