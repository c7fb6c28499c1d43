"""Datasets of the Hugging Face Hub, streamed; a Hub that is away is asked again."""

import dataclasses
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvpath.data.cache import digest
from kvpath.data.readers import Reading, check_text
from kvpath.data.sources.base import BadDocuments, PartedSource, first_number
from kvpath.errors import UserError

if TYPE_CHECKING:
    from datasets import IterableDataset

_LONGEST_WAIT = 60.0
_T = TypeVar("_T")


@dataclass
class Hub(PartedSource):
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
        bad_documents: refuse a row that holds no text, or skip, count and report it.
        tries: how often a Hub that does not answer is asked in a row, after 1, 2, 4, ... and at most 60 seconds.
    """

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    text_field: str = "text"
    data_files: list[str] | None = None
    max_documents: int | None = None
    bad_documents: BadDocuments = "refuse"
    tries: int = 7

    @property
    def label(self) -> str:
        return f"{self.path}/{self.name}" if self.name else self.path

    def fingerprint(self) -> str:
        declared = {name: value for name, value in dataclasses.asdict(self).items() if name != "tries"}
        if re.fullmatch(r"[0-9a-f]{40}", self.revision or ""):
            return digest("hub", declared)
        from datasets import load_dataset_builder

        with _said_plainly(self.label):
            builder = self._asked(
                lambda: load_dataset_builder(
                    self.path, name=self.name, revision=self.revision, data_files=self.data_files
                )
            )
        return digest("hub", declared, builder.config_id, builder.hash)

    def pieces(self) -> Sequence["_HubPart"]:
        with _said_plainly(self.label):
            dataset = self._asked(self.load)
        return [_HubPart(self, dataset, i) for i in range(dataset.num_shards)]

    def load(self) -> "IterableDataset":
        """The dataset, to be streamed."""
        from datasets import load_dataset

        return load_dataset(
            self.path,
            name=self.name,
            split=self.split,
            revision=self.revision,
            data_files=self.data_files,
            streaming=True,
        )

    def rows(self, dataset: "IterableDataset", shard: int) -> Iterator[dict[str, Any]]:
        """The rows of one shard, gone on with after the last one that arrived whenever the Hub falls silent."""
        of, n_rows, failures = dataset.num_shards, 0, 0
        with _said_plainly(self.label):
            while True:
                try:
                    for row in dataset.shard(of, shard).skip(n_rows):
                        n_rows, failures = n_rows + 1, 0
                        yield row
                    return
                except _network_errors() as error:
                    failures += 1
                    self._wait(failures, error)

    def _asked(self, ask: Callable[[], _T]) -> _T:
        failures = 0
        while True:
            try:
                return ask()
            except _network_errors() as error:
                failures += 1
                self._wait(failures, error)

    def _wait(self, failures: int, error: BaseException) -> None:
        """Before another try.

        Raises:
            UserError: there have been enough.
            the error: if it would come again.
        """
        if not _is_away(error):
            raise error
        reason = " ".join(str(error).split()) or type(error).__name__
        if failures >= self.tries:
            raise UserError(f"dataset {self.label!r}: the Hub did not answer {failures} times in a row: {reason}")
        seconds = min(2.0 ** (failures - 1), _LONGEST_WAIT)
        print(
            f"{self.label}: the Hub does not answer ({reason}); try {failures + 1} of {self.tries} in {seconds:g} s",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(seconds)


class _HubPart:
    """One shard of the dataset: one of its data files."""

    n_bytes = None

    def __init__(self, hub: Hub, dataset: "IterableDataset", shard: int) -> None:
        self._hub, self._dataset, self._shard = hub, dataset, shard
        self._reading, self._n_rows = Reading(), 0

    @property
    def skipped(self) -> int:
        return self._reading.skipped

    @property
    def fraction(self) -> float | None:
        """By the number of rows that the dataset's card states."""
        splits = getattr(getattr(self._dataset, "info", None), "splits", None) or {}
        known = splits[self._hub.split].num_examples if self._hub.split in splits else None
        return min(1.0, self._n_rows * self._dataset.num_shards / known) if known else None

    def numbered(self) -> Iterator[tuple[int, str]]:
        hub, number = self._hub, first_number(self._shard)
        self._reading, self._n_rows = Reading(hub.bad_documents == "skip"), 0
        where = f"{hub.label}, split {hub.split!r}"
        if self._dataset.num_shards > 1:
            where += f", shard {self._shard + 1}"
        for row in hub.rows(self._dataset, self._shard):
            self._n_rows += 1
            with self._reading.of_document():
                text = check_text(row, hub.text_field, f"{where}, row {self._n_rows}")
                yield number, text
                number += 1


@contextmanager
def _said_plainly(label: str) -> Iterator[None]:
    """What ``datasets`` and ``huggingface_hub`` raise for a wrong name, split or revision."""
    try:
        yield
    except (FileNotFoundError, ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(f"dataset {label!r} cannot be read: {' '.join(str(error).split())}") from error


def _network_errors() -> tuple[type[BaseException], ...]:
    """What may come of a network; the libraries that raise their own are looked up once they are in use."""
    own = {"httpx": "TransportError", "aiohttp": "ClientError", "requests": "RequestException"}
    return (OSError, *(getattr(sys.modules[module], name) for module, name in own.items() if module in sys.modules))


def _is_away(error: BaseException) -> bool:
    """Whether the same question may be answered later."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled | FileNotFoundError | PermissionError):
        return False
    if OfflineModeIsEnabled.__name__ in str(error):  # datasets names it in an error of a Hub that is away
        return False
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status == 429 or status >= 500
    return not isinstance(error, OSError) or isinstance(error, ConnectionError | TimeoutError) or not error.errno
