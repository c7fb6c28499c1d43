"""The order is a permutation of each epoch, and nothing but seed, epoch and position decides it."""

import numpy as np
import pytest

from kvpath.data.order import Order


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


PINNED = [7, 9, 3, 1, 5, 6, 2, 4, 8, 0]
