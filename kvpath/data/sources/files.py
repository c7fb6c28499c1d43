"""Documents in local files, and in files that an installed package carries."""

import glob
import importlib.util
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpath.data.cache import digest
from kvpath.data.readers import COMPRESSIONS, FORMATS, Reading, file_format, read_texts
from kvpath.data.sources.base import BadDocuments, PartedSource, first_number
from kvpath.errors import UserError

_TOGETHER = 64 * 2**20
"""Bytes of .txt files that make one part: a file is one document, which would be too little."""


class _FileSource(PartedSource):
    text_field: str

    @abstractmethod
    def paths(self) -> list[Path]:
        """The files, in order, each once."""

    def pieces(self) -> Sequence["_FilesPart"]:
        skip = self.bad_documents == "skip"
        groups = _grouped(self.paths())
        return [_FilesPart(group, self.text_field, skip, first_number(i)) for i, group in enumerate(groups)]

    def fingerprint(self) -> str:
        files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in self.paths()]
        return digest("files", files, self.text_field, self.max_documents, self.bad_documents)


@dataclass
class Files(_FileSource):
    """Local files: .txt (a file is a document), .jsonl and .parquet (a row is one), each also .gz or .zst.

    Args:
        files: paths or globs; ``**`` reaches into folders. Each glob's files are read in sorted order.
        text_field: the field of a row that holds its text.
        max_documents: stop after this many documents; None reads all.
        bad_documents: refuse what cannot be decoded (not UTF-8, not JSON, no text), or skip, count and report it.
    """

    files: list[str]
    text_field: str = "text"
    max_documents: int | None = None
    bad_documents: BadDocuments = "refuse"

    @property
    def label(self) -> str:
        return ", ".join(self.files)

    def paths(self) -> list[Path]:
        """The files that the patterns name, in order, each once.

        Raises:
            UserError: lists every pattern without a file, every empty file, every unknown suffix.
        """
        problems: list[str] = []
        paths: dict[Path, None] = {}
        for pattern in self.files:
            matches = _matches(os.path.expanduser(pattern))
            if not matches:
                problems.append(f"files: nothing matches {pattern!r}")
            paths.update(dict.fromkeys(matches))
        for path in paths:
            if file_format(path) is None:
                known = f"{', '.join(FORMATS)}, each also {' or '.join(COMPRESSIONS)}"
                problems.append(f"files: {path} has an unknown suffix; known are {known}")
            elif path.stat().st_size == 0:
                problems.append(f"files: {path} is empty")
        if not self.files:
            problems.append("files is an empty list: name at least one path or glob")
        UserError.raise_all(problems)
        return list(paths)


@dataclass
class PackageFiles(_FileSource):
    """Text files that an installed Python package carries; the package itself is never imported.

    Args:
        package: the top-level name of the package, as in ``import``.
        pattern: glob of the files, relative to the package's folder.
        text_field: the field of a row that holds its text, for .jsonl and .parquet.
        max_documents: stop after this many documents; None reads all.
        bad_documents: refuse what cannot be decoded (not UTF-8, not JSON, no text), or skip, count and report it.
    """

    package: str
    pattern: str
    text_field: str = "text"
    max_documents: int | None = None
    bad_documents: BadDocuments = "refuse"

    @property
    def label(self) -> str:
        return self.package

    def paths(self) -> list[Path]:
        """The files that the pattern names, in order.

        Raises:
            UserError: the package is not installed, or lists what is wrong with the files.
        """
        spec = importlib.util.find_spec(self.package) if self.package.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"package {self.package!r} is not installed: pip install {self.package}")
        folders = [glob.escape(folder) for folder in spec.submodule_search_locations]
        return Files([os.path.join(folder, self.pattern) for folder in folders]).paths()


class _FilesPart:
    """Some files in a row."""

    def __init__(self, paths: list[Path], text_field: str, skip_bad: bool, first: int) -> None:
        self._paths, self._text_field, self._skip_bad, self._first = paths, text_field, skip_bad, first
        self._reading = Reading(skip_bad)
        self._sizes = [path.stat().st_size for path in paths]
        self._n_files_read = 0

    @property
    def n_bytes(self) -> int:
        return sum(self._sizes)

    @property
    def skipped(self) -> int:
        return self._reading.skipped

    @property
    def fraction(self) -> float:
        done = sum(self._sizes[: self._n_files_read])
        if self._n_files_read < len(self._sizes):
            done += int(self._reading.fraction * self._sizes[self._n_files_read])
        return done / self.n_bytes

    def numbered(self) -> Iterator[tuple[int, str]]:
        self._reading, self._n_files_read = Reading(self._skip_bad), 0
        number = self._first
        for path in self._paths:
            for text in read_texts(path, self._text_field, self._reading):
                yield number, text
                number += 1
            self._n_files_read += 1


def _grouped(paths: list[Path]) -> list[list[Path]]:
    """Files in parts: neighbouring .txt files together, every other one alone."""
    groups: list[list[Path]] = []
    room = 0
    for path in paths:
        size = path.stat().st_size
        if file_format(path) == ".txt" and size <= room:
            groups[-1].append(path)
            room -= size
        else:
            groups.append([path])
            room = _TOGETHER - size if file_format(path) == ".txt" else 0
    return groups


def _matches(pattern: str) -> list[Path]:
    if os.path.isfile(pattern):
        return [Path(pattern).resolve()]
    return [Path(match).resolve() for match in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(match)]
