"""The order is a permutation of each epoch, and nothing but seed, epoch and position decides it."""

import numpy as np
import pytest

from kvpath.data.order import BlockOrder, Order


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000])
def test_every_epoch_is_a_permutation(n: int) -> None:
    found = Order(n, seed=3).index(np.arange(4 * n)).reshape(4, n)
    assert np.array_equal(np.sort(found, axis=1), np.tile(np.arange(n), (4, 1)))


def test_epochs_and_seeds_differ() -> None:
    n = 1000
    orders = [Order(n, seed).index(np.arange(3 * n)).reshape(3, n) for seed in (0, 1, 2, -1, 2**63)]
    rows = np.concatenate(orders)
    for i in range(len(rows)):
        for j in range(i):
            # two random permutations agree in one place on average
            assert np.count_nonzero(rows[i] == rows[j]) < 15


def test_positions_can_be_asked_for_in_any_grouping() -> None:
    order = Order(37, seed=1)
    positions = np.arange(120)
    whole = order.index(positions)
    assert np.array_equal(order.index(positions.reshape(4, 5, 6)), whole.reshape(4, 5, 6))
    assert [int(order.index(np.array([p]))[0]) for p in positions] == whole.tolist()
    assert np.array_equal(order.index(positions[::-1]), whole[::-1])


def test_the_order_never_changes() -> None:
    assert Order(10, seed=0).index(np.arange(10)).tolist() == PINNED


def test_the_order_is_well_mixed() -> None:
    n = 4096
    found = Order(n, seed=0).index(np.arange(n))
    # neighbours in the order are no neighbours in the corpus, and each part of the order draws on the whole corpus
    assert np.mean(np.abs(np.diff(found)) == 1) < 0.005
    assert abs(np.corrcoef(np.arange(n), found)[0, 1]) < 0.06
    counts = np.histogram(found[: n // 4], bins=16, range=(0, n))[0]
    assert counts.min() > 35
    assert counts.max() < 95


def test_positions_of_large_corpora() -> None:
    n = 50_000_000_000
    found = Order(n, seed=0).index(np.array([0, 1, n - 1, n, 10 * n + 5]))
    assert len(set(found.tolist())) == 5
    assert found.min() >= 0
    assert found.max() < n


def test_no_windows_no_order() -> None:
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        Order(0, seed=0)


def stream(n_tokens: int, seq_len: int, n_windows: int, start: int = 0) -> list[int]:
    """The first tokens of the stream of the corpus 0, 1, 2, ..., in shuffled blocks of 16."""
    order = BlockOrder((n_tokens - 1) // seq_len, 16 // seq_len, seed=3, start=start)
    windows = order.index(np.arange(n_windows))
    return (windows[:, None] * seq_len + np.arange(seq_len)).ravel().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("n_tokens", [16 * 12 + 1, 16 * 13])  # the last block whole, or one token short of that
def test_one_block_one_stream_at_every_length(n_tokens: int) -> None:
    long = stream(n_tokens, 16, 3 * 12)
    assert stream(n_tokens, 8, 3 * 24) == stream(n_tokens, 4, 3 * 48) == long
    for epoch in range(3):
        assert sorted(long[epoch * 192 : (epoch + 1) * 192]) == list(range(192))
    assert long[:192] != long[192:384]
    assert any(long[i] + 1 != long[i + 1] for i in range(191))


def test_a_stream_goes_on_at_another_length() -> None:
    whole = stream(16 * 12 + 1, 4, 3 * 48)
    assert stream(16 * 12 + 1, 4, 40, start=10) == whole[40:200]
    assert stream(16 * 12 + 1, 8, 20, start=5) == whole[40:200]
    assert stream(16 * 12 + 1, 16, 10, start=13) == whole[208:368]


def test_windows_of_a_block_follow_each_other() -> None:
    found = BlockOrder(31, 4, seed=0).index(np.arange(2 * 28)).reshape(-1, 4)
    assert np.array_equal(np.diff(found, axis=1), np.ones((14, 3)))
    assert sorted(found[:7, 0]) == sorted(found[7:, 0]) == [0, 4, 8, 12, 16, 20, 24]


def test_blocks_of_one_window_are_the_plain_order() -> None:
    assert np.array_equal(BlockOrder(37, 1, seed=1).index(np.arange(80)), Order(37, seed=1).index(np.arange(80)))


def test_epochs_are_counted_from_where_the_stream_starts() -> None:
    order = BlockOrder(31, 4, seed=0)
    assert order.n == 28
    assert [order.epoch(position) for position in (0, 27, 28, 56)] == [0, 0, 1, 2]
    assert [BlockOrder(31, 4, seed=0, start=20).epoch(position) for position in (7, 8)] == [0, 1]


PINNED = [7, 9, 3, 1, 5, 6, 2, 4, 8, 0]
