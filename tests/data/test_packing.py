"""No token is lost and none is a label twice, at any context length."""

import numpy as np
import pytest

from kvpath.data.packing import IGNORE, Windows, part_documents


@pytest.mark.parametrize("context", [1, 2, 3, 7, 19, 20, 50])
@pytest.mark.parametrize("n_tokens", [1, 2, 20, 21, 22])
def test_every_token_but_the_first_is_scored_once(context: int, n_tokens: int) -> None:
    region = np.arange(100, 100 + n_tokens, dtype=np.uint16)
    windows = Windows(region, context, short_last=True)
    pairs = [windows.window(i) for i in range(windows.n_windows)]
    labels = np.concatenate([labels for _, labels in pairs]) if pairs else np.empty(0, dtype=np.int64)
    assert labels[labels != IGNORE].tolist() == region[1:].tolist()
    for tokens_C, labels_C in pairs:
        scored = labels_C != IGNORE
        assert scored[0]
        assert np.array_equal(tokens_C[scored] + 1, labels_C[scored])
        assert np.all(np.diff(scored.astype(int)) <= 0)


@pytest.mark.parametrize(("n_tokens", "expected"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_training_keeps_whole_windows_only(n_tokens: int, expected: int) -> None:
    windows = Windows(np.arange(n_tokens), 4)
    assert windows.n_windows == expected
    for i in range(expected):
        tokens_C, labels_C = windows.window(i)
        assert tokens_C.tolist() == list(range(4 * i, 4 * i + 4))
        assert labels_C.tolist() == list(range(4 * i + 1, 4 * i + 5))


@pytest.mark.parametrize("i", [-1, 2])
def test_a_window_outside_is_all_padding(i: int) -> None:
    tokens_C, labels_C = Windows(np.arange(9), 4).window(i)
    assert np.all(labels_C == IGNORE)
    assert np.all(tokens_C == 0)


def test_documents_that_stand_alone() -> None:
    end = 9
    tokens = np.array([[5, 6, end, end, 7, 8], [end, 1, 2, 3, 4, end]])
    batch = part_documents(tokens, np.array([[6, end, end, 7, 8, 1], [1, 2, 3, 4, end, 0]]), end)
    assert batch["documents"].tolist() == [[0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 1, 1]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 0, 1], [0, 0, 1, 2, 3, 4]]
    # the end is predicted by the token before it, and predicts nothing
    assert batch["labels"].tolist() == [[6, end, IGNORE, IGNORE, 8, 1], [IGNORE, 2, 3, 4, end, IGNORE]]


@pytest.mark.parametrize("numbers", [[2, 0, 1], [3, 1], [4, -1, 0], []])
def test_a_batch_is_its_windows(numbers: list[int]) -> None:
    windows = Windows(np.arange(3, 19, dtype=np.uint16), 4, short_last=True)  # three full windows, and one of three
    tokens_NC, labels_NC = windows.batch(numbers)
    assert tokens_NC.dtype == labels_NC.dtype == np.int64
    assert tokens_NC.tolist() == [windows.window(i)[0].tolist() for i in numbers]
    assert labels_NC.tolist() == [windows.window(i)[1].tolist() for i in numbers]
