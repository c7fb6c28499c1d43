"""Overlapping windows: no token is lost, none is scored twice, and each has enough before it."""

import numpy as np
import pytest

from kvpath.data.packing import IGNORE, Windows
from kvpath.data.sliding import SlidingWindows


@pytest.mark.parametrize(("context", "stride"), [(1, 1), (4, 1), (4, 3), (4, 4), (7, 2), (50, 3)])
@pytest.mark.parametrize("n_tokens", [0, 1, 2, 5, 8, 20, 21, 22])
def test_every_token_but_the_first_is_scored_once(context: int, stride: int, n_tokens: int) -> None:
    region = np.arange(100, 100 + n_tokens, dtype=np.uint16)
    windows = SlidingWindows(region, context, stride)
    scored: list[int] = []
    for i in range(windows.n_windows):
        tokens_C, labels_C = windows.window(i)
        places = np.flatnonzero(labels_C != IGNORE)
        assert len(places) > 0
        assert np.array_equal(tokens_C[places] + 1, labels_C[places])
        # what is read is consecutive, up to the last place that is scored
        assert np.array_equal(tokens_C[: places[-1] + 1], tokens_C[0] + np.arange(places[-1] + 1))
        assert i == 0 or places[0] >= context - stride
        scored += labels_C[places].tolist()
    assert scored == region[1:].tolist()


def test_a_stride_of_the_context_is_no_overlap() -> None:
    region = np.arange(3, 19, dtype=np.uint16)
    sliding, plain = SlidingWindows(region, 4, 4), Windows(region, 4, short_last=True)
    assert sliding.n_windows == plain.n_windows
    for i in range(-1, plain.n_windows + 1):
        for found, expected in zip(sliding.window(i), plain.window(i), strict=True):
            assert found.tolist() == expected.tolist()
        if 0 <= i < plain.n_windows:
            assert sliding.spans(i) == plain.spans(i)


def test_a_batch_is_its_windows() -> None:
    windows = SlidingWindows(np.arange(3, 19, dtype=np.uint16), 4, 3)
    tokens_NC, labels_NC = windows.batch([2, 0, -1])
    assert tokens_NC.tolist() == [windows.window(i)[0].tolist() for i in (2, 0, -1)]
    assert labels_NC.tolist() == [windows.window(i)[1].tolist() for i in (2, 0, -1)]
