"""Numbers in files, mapped into memory when they are read: one file, many files as one, the front of either."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvpath.data.packing import TokenRun
from kvpath.data.regions import Corpus, Manifest

_OPEN_FILES = 256
"""Files of one run that are mapped at a time: each takes a file descriptor, of which a process may have 1,024."""


class MappedArray:
    """A file of numbers, mapped when first read, so that processes that get it by pickle map it anew."""

    def __init__(self, path: Path, dtype: DTypeLike, length: int) -> None:
        self._path, self._dtype, self._length = path, np.dtype(dtype), length
        self._array: NDArray[np.integer] | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: slice) -> NDArray[np.integer]:
        if self._array is None:
            # an empty file cannot be mapped; slices of a plain array are made faster than those of a memmap
            empty = np.empty(0, dtype=self._dtype)
            self._array = np.asarray(np.memmap(self._path, mode="r", dtype=self._dtype)) if self._length else empty
        return self._array[index]

    def close(self) -> None:
        """Let go of the file; the next read maps it again."""
        self._array = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_array": None}


class JoinedRun:
    """Many mapped files as one run; a slice across their borders is joined.

    Args:
        files: in their order.
        add: to all numbers of a file; None adds nothing.
        leave_out: numbers at the end of each file that are not part of the run.
        end: numbers that follow the last file.
    """

    def __init__(
        self,
        files: Sequence[MappedArray],
        add: Sequence[int] | None = None,
        leave_out: int = 0,
        end: NDArray[np.integer] | None = None,
    ) -> None:
        self._files, self._add, self._end = files, add, end
        self._starts = [0, *accumulate(len(file) - leave_out for file in files)]
        self._length = self._starts[-1] + (0 if end is None else len(end))
        self._open: dict[int, None] = {}  # the least recently read first

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: slice) -> NDArray[np.integer]:
        start, stop, step = index.indices(self._length)
        if step != 1:
            raise ValueError(f"a run is read without gaps, got a step of {step}")
        file = bisect_right(self._starts, start) - 1
        if file < len(self._files) and start < stop <= self._starts[file + 1]:  # as nearly always
            return self._read(file, start - self._starts[file], stop - self._starts[file])
        found = []
        while file < len(self._files) and (file_start := self._starts[file]) < stop:
            file_stop = self._starts[file + 1]
            if file_stop > start:
                found.append(self._read(file, max(start, file_start) - file_start, min(stop, file_stop) - file_start))
            file += 1
        if self._end is not None and stop > (files_end := self._starts[-1]):
            found.append(self._end[max(0, start - files_end) : stop - files_end])
        if not found:
            return self._files[0][0:0] if self._files else np.empty(0, dtype=np.uint16)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _read(self, file: int, start: int, stop: int) -> NDArray[np.integer]:
        if len(self._files) > _OPEN_FILES:
            self._keep_open(file)
        read = self._files[file][start:stop]
        return read if self._add is None else read + read.dtype.type(self._add[file])

    def _keep_open(self, file: int) -> None:
        """Count a file as just read, and let go of the one that was read longest ago."""
        self._open.pop(file, None)
        self._open[file] = None
        if len(self._open) > _OPEN_FILES:
            oldest = next(iter(self._open))
            del self._open[oldest]
            self._files[oldest].close()


def document_at(offsets: TokenRun, token: int) -> int:
    """The number of the document that a token is in; found by halving, so that offsets are read where needed alone.

    Args:
        offsets: (n_documents + 1,): where documents begin, and the last ends.
        token: its place; one that is not below the last offset gives n_documents.
    """
    return bisect_right(range(len(offsets)), token, key=lambda i: int(offsets[i : i + 1][0])) - 1


def documents_in(offsets: TokenRun, spans: list[tuple[int, int]]) -> list[int]:
    """The numbers of the documents that tokens [start, stop) of each span are in, sorted, each once."""
    found: set[int] = set()
    for start, stop in spans:
        found.update(range(document_at(offsets, start), document_at(offsets, stop - 1) + 1))
    return sorted(found)


@dataclass(frozen=True)
class FirstTokens:
    """The whole documents at the front of a corpus that together have at most so many tokens.

    Args:
        corpus: what to cut.
        max_tokens: tokens that are left, at most.
    """

    corpus: Corpus
    max_tokens: int

    @property
    def _n_documents(self) -> int:
        return document_at(self.corpus.offsets, self.max_tokens)

    @property
    def offsets(self) -> TokenRun:
        """(n_documents + 1,)."""
        return _Front(self.corpus.offsets, self._n_documents + 1)

    @property
    def tokens(self) -> TokenRun:
        """(n_tokens,)."""
        return _Front(self.corpus.tokens, self.manifest.n_tokens)

    @property
    def manifest(self) -> Manifest:
        """Of what is left; its bytes are in proportion to the tokens."""
        whole, n = self.corpus.manifest, self._n_documents
        n_tokens = int(self.corpus.offsets[n : n + 1][0])
        n_bytes = whole.n_bytes * n_tokens // max(1, whole.n_tokens)
        return replace(whole, n_documents=n, n_tokens=n_tokens, n_bytes=n_bytes)


@dataclass(frozen=True)
class _Front:
    run: TokenRun
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: slice) -> NDArray[np.integer]:
        start, stop, _ = index.indices(self.length)
        return self.run[start : max(start, stop)]
