"""Where documents come from: files, files inside an installed package, or a Hub dataset."""

import dataclasses
import glob
import importlib.util
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kvpath.data.cache import digest
from kvpath.data.readers import COMPRESSIONS, FORMATS, check_text, file_format, read_texts
from kvpath.errors import UserError

if TYPE_CHECKING:
    from datasets import IterableDataset


class Source(ABC):
    """A stream of documents that comes out the same each time."""

    @property
    @abstractmethod
    def label(self) -> str:
        """What to call this source in a message or a table."""

    @abstractmethod
    def documents(self) -> Iterator[str]:
        """All documents, always in the same order.

        Raises:
            UserError: for whatever cannot be read, naming where it is.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """A short string that changes whenever the documents would.

        Raises:
            UserError: if the source is not there.
        """


@dataclass
class Files(Source):
    """Local files: .txt (a file is a document), .jsonl and .parquet (a row is one), each also .gz or .zst.

    Args:
        files: paths or globs; ``**`` reaches into folders. Each glob's files are read in sorted order.
        text_field: the field of a row that holds its text.
        max_documents: stop after this many documents; None reads all.
    """

    files: list[str]
    text_field: str = "text"
    max_documents: int | None = None

    @property
    def label(self) -> str:
        return ", ".join(self.files)

    def documents(self) -> Iterator[str]:
        texts = (text for path in self.paths() for text in read_texts(path, self.text_field))
        return islice(texts, _checked_limit(self.max_documents))

    def fingerprint(self) -> str:
        files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in self.paths()]
        return digest("files", files, self.text_field, self.max_documents)

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
class PackageFiles(Source):
    """Text files that an installed Python package carries; the package itself is never imported.

    Args:
        package: the top-level name of the package, as in ``import``.
        pattern: glob of the files, relative to the package's folder.
        text_field: the field of a row that holds its text, for .jsonl and .parquet.
        max_documents: stop after this many documents; None reads all.
    """

    package: str
    pattern: str
    text_field: str = "text"
    max_documents: int | None = None

    @property
    def label(self) -> str:
        return self.package

    def documents(self) -> Iterator[str]:
        return self._files().documents()

    def fingerprint(self) -> str:
        return self._files().fingerprint()

    def _files(self) -> Files:
        spec = importlib.util.find_spec(self.package) if self.package.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"package {self.package!r} is not installed: pip install {self.package}")
        folders = [glob.escape(folder) for folder in spec.submodule_search_locations]
        patterns = [os.path.join(folder, self.pattern) for folder in folders]
        return Files(patterns, self.text_field, self.max_documents)


@dataclass
class Hub(Source):
    """A dataset of the Hugging Face Hub, streamed: its data files are read, code of it never runs.

    A format (``path: json``, ``path: parquet``) with ``data_files``, or a local folder, works the same without network.
    ``HF_HOME``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` mean what they always mean.

    Args:
        path: the dataset on the Hub, a local folder, or a format.
        name: the configuration of the dataset, where it has several.
        split: the split to read.
        revision: branch, tag or commit. With a full commit hash, a corpus already tokenised is found without network.
        text_field: the column that holds the text.
        data_files: read only these files (paths or globs).
        max_documents: stop after this many documents; None reads all.
    """

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    text_field: str = "text"
    data_files: list[str] | None = None
    max_documents: int | None = None

    @property
    def label(self) -> str:
        return f"{self.path}/{self.name}" if self.name else self.path

    def documents(self) -> Iterator[str]:
        return islice(self._texts(), _checked_limit(self.max_documents))

    def fingerprint(self) -> str:
        declared = digest("hub", dataclasses.asdict(self))
        if re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            return declared
        from datasets import load_dataset_builder

        with _hub_errors(self.label):
            builder = load_dataset_builder(
                self.path, name=self.name, revision=self.revision, data_files=self.data_files
            )
        return digest(declared, builder.config_id, builder.hash)

    def _texts(self) -> Iterator[str]:
        with _hub_errors(self.label):
            rows = self._load()
            for number, row in enumerate(rows, start=1):
                yield check_text(row, self.text_field, f"{self.label}, split {self.split!r}, row {number}")

    def _load(self) -> "IterableDataset":
        from datasets import load_dataset

        return load_dataset(
            self.path,
            name=self.name,
            split=self.split,
            revision=self.revision,
            data_files=self.data_files,
            streaming=True,
        )


@contextmanager
def _hub_errors(label: str) -> Iterator[None]:
    """What ``datasets`` and ``huggingface_hub`` raise for a wrong name, split or revision, or without network."""
    try:
        yield
    except (FileNotFoundError, ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(f"dataset {label!r} cannot be read: {' '.join(str(error).split())}") from error


def _matches(pattern: str) -> list[Path]:
    if os.path.isfile(pattern):
        return [Path(pattern).resolve()]
    return [Path(match).resolve() for match in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(match)]


def _checked_limit(max_documents: int | None) -> int | None:
    if max_documents is not None and max_documents < 1:
        raise UserError(f"max_documents must be at least 1 or null, got {max_documents}")
    return max_documents
