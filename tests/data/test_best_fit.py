"""Best fit packs every token once, whole documents where they fit, and by nothing but the corpus and the group."""

import random
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpath.data.best_fit import BestFit, pack_documents
from kvpath.data.packing import IGNORE

END, CONTEXT = 0, 16


class Corpus:
    """Documents whose tokens are all different, each followed by END."""

    def __init__(self, lengths: list[int]) -> None:
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64)
        self.tokens: NDArray[np.uint32] = np.arange(1, int(self.offsets[-1]) + 1, dtype=np.uint32)
        self.tokens[(self.offsets[1:] - 1).astype(int)] = END


@pytest.fixture
def corpus() -> Corpus:
    draw = random.Random(0)
    odd = [1, CONTEXT, CONTEXT + 1, 2 * CONTEXT, 5 * CONTEXT - 1, CONTEXT - 1, 1, 1]
    return Corpus([*odd, *(draw.randint(1, 40) for _ in range(200))])


@pytest.mark.parametrize("group", [1, 7, 64, 10_000])
def test_no_token_is_lost_or_doubled(corpus: Corpus, group: int) -> None:
    packed = BestFit(corpus, "a", CONTEXT, group, END)
    rows = [packed.window(i) for i in range(packed.n_windows)]
    tokens = np.concatenate([row for row, _ in rows])
    read = tokens[tokens != END]
    assert sorted(read.tolist()) == sorted(corpus.tokens[corpus.tokens != END].tolist())
    # every token but a document's first is a label once
    labels = np.concatenate([of_row for _, of_row in rows])
    expected = np.delete(corpus.tokens, corpus.offsets[:-1].astype(int))
    assert sorted(labels[labels != IGNORE].tolist()) == sorted(expected.tolist())


def test_labels_are_the_next_tokens_of_a_document(corpus: Corpus) -> None:
    packed = BestFit(corpus, "a", CONTEXT, 32, END)
    follows = dict(zip(corpus.tokens[:-1].tolist(), corpus.tokens[1:].tolist(), strict=True))
    for i in range(packed.n_windows):
        tokens, labels = packed.window(i)
        assert labels.tolist() == [IGNORE if token == END else follows[token] for token in tokens.tolist()]
    assert len(corpus.tokens) < packed.n_windows * CONTEXT < 1.05 * len(corpus.tokens)


def test_documents_stay_whole_unless_longer_than_a_sequence(corpus: Corpus) -> None:
    rows = pack_documents(corpus.offsets.astype(np.int64), CONTEXT)
    pieces = sorted(zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True))
    bounds = corpus.offsets.astype(int).tolist()
    expected = [
        (place, min(CONTEXT, end - place))
        for start, end in zip(bounds[:-1], bounds[1:], strict=True)
        for place in range(start, end, CONTEXT)
    ]
    assert pieces == expected
    in_rows = [rows.lengths[a:b].sum() for a, b in zip(rows.ends[:-1], rows.ends[1:], strict=True)]
    assert max(in_rows) <= CONTEXT


def test_it_is_best_fit() -> None:
    rows = pack_documents(np.cumsum([0, 9, 5, 7, 6, 4, 1]), context=10)
    sizes = [rows.lengths[a:b].tolist() for a, b in zip(rows.ends[:-1], rows.ends[1:], strict=True)]
    # 9, 7, 6, 5, 4, 1 in that order: 1 goes beside 9, where it leaves least
    assert sizes == [[9, 1], [5], [7], [6, 4]]


def test_the_plan_is_made_once_and_depends_on_the_group(corpus: Corpus, cache: Path) -> None:
    first = BestFit(corpus, "a", CONTEXT, 64, END)
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*.bin")}
    again = BestFit(corpus, "a", CONTEXT, 64, END)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.bin")} == files
    assert [first.window(i)[0].tolist() for i in range(5)] == [again.window(i)[0].tolist() for i in range(5)]
    assert BestFit(corpus, "a", CONTEXT, 1, END).n_windows > first.n_windows


@pytest.mark.parametrize("i", [-1, 10**6])
def test_a_row_outside_is_all_padding(corpus: Corpus, i: int) -> None:
    tokens, labels = BestFit(corpus, "a", CONTEXT, 64, END).window(i)
    assert (labels == IGNORE).all()
    assert (tokens == 0).all()
