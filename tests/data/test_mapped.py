"""Many files read like one, and the front of a corpus like a corpus."""

import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvpath.data import mapped
from kvpath.data.mapped import FirstTokens, JoinedRun, MappedArray, documents_in
from kvpath.data.packing import TokenRun
from kvpath.data.regions import Manifest

LENGTHS = [3, 0, 1, 7, 0, 2]


@pytest.fixture
def arrays(tmp_path: Path) -> list[MappedArray]:
    made = []
    for i, length in enumerate(LENGTHS):
        (tmp_path / str(i)).write_bytes((np.arange(length, dtype=np.uint16) + 100 * i).tobytes())
        made.append(MappedArray(tmp_path / str(i), np.uint16, length))
    return made


def test_every_slice_of_a_joined_run(arrays: list[MappedArray]) -> None:
    whole = np.concatenate([array[:] for array in arrays])
    run = JoinedRun(arrays)
    assert len(run) == len(whole) == 13
    for start in range(-14, 16):
        for stop in range(-14, 16):
            assert np.array_equal(run[start:stop], whole[start:stop]), (start, stop)
    assert run[:].dtype == run[0:0].dtype == np.uint16
    with pytest.raises(ValueError, match="a step of 2"):
        run[::2]


def test_what_is_added_left_out_and_put_at_the_end(arrays: list[MappedArray]) -> None:
    files = [arrays[0], arrays[3]]
    run = JoinedRun(files, add=[10, 20], leave_out=1, end=np.array([7, 8], dtype=np.uint16))
    expected = [10, 11, *range(320, 326), 7, 8]
    for start in range(11):
        for stop in range(11):
            assert run[start:stop].tolist() == expected[start:stop]


def test_few_files_are_open_at_a_time(arrays: list[MappedArray], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "_OPEN_FILES", 2)
    run = JoinedRun(arrays)
    whole = run[:].copy()
    assert sum(array._array is not None for array in arrays) <= 2
    assert np.array_equal(run[:], whole)
    assert np.array_equal(pickle.loads(pickle.dumps(run))[:], whole)


def test_a_run_of_no_files_is_empty() -> None:
    assert len(JoinedRun([])) == len(JoinedRun([])[:]) == 0


@dataclass
class Corpus:
    tokens: TokenRun
    offsets: TokenRun
    manifest: Manifest


@pytest.mark.parametrize(
    ("max_tokens", "n_documents", "n_tokens"), [(1, 0, 0), (5, 1, 5), (11, 2, 6), (12, 3, 12), (99, 3, 12)]
)
def test_the_first_tokens_are_whole_documents(max_tokens: int, n_documents: int, n_tokens: int) -> None:
    manifest = Manifest(1, "", "", "", "train", "uint16", 3, 12, 120)
    whole = Corpus(np.arange(12, dtype=np.uint16), np.array([0, 5, 6, 12], dtype=np.uint64), manifest)
    front = FirstTokens(whole, max_tokens)
    assert (front.manifest.n_documents, front.manifest.n_tokens) == (n_documents, n_tokens)
    assert front.manifest.n_bytes == 10 * n_tokens
    assert len(front.tokens) == len(front.tokens[0:99]) == n_tokens
    assert front.offsets[:].tolist() == [0, 5, 6, 12][: n_documents + 1]


@pytest.mark.parametrize(
    ("spans", "numbers"), [([(0, 5)], [0]), ([(4, 6)], [0, 1]), ([(6, 12), (0, 1)], [0, 2]), ([(4, 7)], [0, 1, 2])]
)
def test_documents_of_tokens(spans: list[tuple[int, int]], numbers: list[int]) -> None:
    assert documents_in(np.array([0, 5, 6, 12], dtype=np.uint64), spans) == numbers
