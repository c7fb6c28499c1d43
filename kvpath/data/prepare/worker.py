"""A worker of ``kvpath prepare``: one part of the source, tokenised into whole shards.

Documents come in the order of the part. A shard ends with the first batch of documents by which it holds
``shard_bytes`` of text, and the next one begins with a new batch; batches depend on the documents alone. So who makes a
shard, and where an attempt before it was killed, changes no byte of it.
"""

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import count, islice
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kvpath.data.cache import write_atomically
from kvpath.data.corpus import in_batches, text_of
from kvpath.data.prepare.job import Job, hold_as_worker
from kvpath.data.prepare.writer import Batch, ShardWriter
from kvpath.data.regions import Split
from kvpath.data.shards import SHARDS, Shard, ShardPlan, files_of, read_json, shard_name
from kvpath.data.sources import Part, Source
from kvpath.data.tokenizer import Tokenizer
from kvpath.errors import UserError


@dataclass
class Progress:
    """What workers tell the process that started them, in shared memory.

    Args:
        counts: documents, tokens, bytes of text and bytes of files so far, over all workers.
        fractions: of each part, how much has been read; NaN where that is not known.
        stop: set when workers should give up.
    """

    counts: "SynchronizedArray[int]"
    fractions: "SynchronizedArray[float]"
    stop: Event

    def add(self, documents: int, tokens: int, text_bytes: int, file_bytes: int) -> None:
        """Count one batch."""
        with self.counts.get_lock():
            for i, n in enumerate((documents, tokens, text_bytes, file_bytes)):
                self.counts[i] += n


class Stopped(Exception):
    """Another worker failed."""


@dataclass
class _Task:
    """What a worker process is given once."""

    source: Source
    tokenizer: Tokenizer
    plan: ShardPlan
    directory: Path
    progress: Progress
    lock: BinaryIO

    @cached_property
    def parts(self) -> Sequence[Part]:
        """Of the source, found once: that may ask the Hub."""
        return self.source.parts()


_task: _Task | None = None
"""Of this worker process, in which nothing else runs."""


def begin(
    source: Source,
    tokenizer: Tokenizer,
    plan: ShardPlan,
    directory: Path,
    job: Job | None,
    progress: Progress,
    threads: int,
) -> None:
    """Set a worker process up.

    Args:
        source: whose parts are to be made.
        tokenizer: makes the tokens.
        plan: decides the bytes.
        directory: the folder of shards.
        job: whose share is made; None makes all.
        progress: is told.
        threads: that tokenise together.
    """
    global _task
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one says when to stop
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = str(threads > 1).lower()
    lock = hold_as_worker(directory, job)
    if not _parent().is_alive():
        os._exit(1)  # before the lock was held: somebody else may have begun
    _task = _Task(source, tokenizer, plan, directory, progress, lock)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker waits for work for ever, and would write on, if the process that started it is killed."""
    _parent().join()
    os._exit(1)


def _parent() -> BaseProcess:
    parent = multiprocessing.parent_process()
    assert parent is not None
    return parent


def make_part(number: int) -> None:
    """Make the shards of one part that are not there yet.

    Raises:
        UserError: for what the source cannot read.
        OSError: for a disk that is full.
        Stopped: there is no use in going on.
    """
    assert _task is not None
    parts = _task.parts
    if len(parts) != _task.plan.n_parts:
        raise UserError(f"source {_task.source.label} had {_task.plan.n_parts} parts, now it has {len(parts)}")
    PartMaker(parts[number], number, _task.tokenizer, _task.plan, _task.directory, _task.progress).run()


def found_shard(directory: Path, plan: ShardPlan, part: int, number: int) -> Shard | None:
    """A shard that was made before: its record is there, and its files have their sizes."""
    path = directory / SHARDS / f"{shard_name(part, number)}.json"
    if not path.is_file():
        return None
    shard = Shard.from_json(read_json(path, "the record of a shard"))
    whole = all(file.is_file() and file.stat().st_size == size for file, size, _ in files_of(directory, plan, shard))
    return shard if whole else None


class PartMaker:
    """Makes the shards of one part.

    Args:
        part: where the documents come from.
        number: of the part.
        tokenizer: makes the tokens.
        plan: decides the bytes.
        directory: the folder of shards.
        progress: is told after each batch.
    """

    def __init__(
        self, part: Part, number: int, tokenizer: Tokenizer, plan: ShardPlan, directory: Path, progress: Progress
    ) -> None:
        self._part, self._number, self._tokenizer = part, number, tokenizer
        self._plan, self._directory, self._progress = plan, directory, progress
        self._split = Split(plan.holdout_every)
        self._share = None if plan.max_tokens is None else -(-plan.max_tokens // plan.n_parts)

    def run(self) -> None:
        """Go through the part from its front; what is there is passed over, not tokenised again."""
        documents = training_tokens = 0  # of the shards before
        batches: Iterator[Batch] | None = None
        for number in count():
            shard = found_shard(self._directory, self._plan, self._number, number)
            if shard is not None:
                batches = None
            else:
                batches = batches or self._batches(islice(self._part.numbered(), documents, None))
                shard = self._make(number, batches, training_tokens)
            documents += shard.documents
            training_tokens += shard.regions["train"].tokens
            if shard.last:
                break
        self._progress.fractions[self._number] = 1.0

    def _make(self, number: int, batches: Iterator[Batch], training_tokens: int) -> Shard:
        """One shard: its files, and then its record. The part has given so many training tokens before."""
        room = None if self._share is None else self._share - training_tokens
        writer = ShardWriter(self._directory, shard_name(self._number, number), self._plan)
        try:
            last, skipped = True, None
            for whole in batches:
                self._check_in(whole.fraction)
                batch = whole.cut(room)
                written = writer.add(batch)
                self._progress.add(len(batch.lengths), len(batch.tokens), int(batch.bytes.sum()), written)
                if room is not None:
                    room -= int(batch.lengths[batch.of("train")].sum())
                    if room <= 0:
                        skipped = batch.skipped
                        break
                if writer.text_bytes >= self._plan.shard_bytes:
                    last = False
                    break
            if skipped is None:
                skipped = self._part.skipped if last else 0
            shard = Shard(self._number, number, skipped, last, writer.finish())
        finally:
            writer.discard()
        record = json.dumps(asdict(shard), indent=1) + "\n"
        write_atomically(self._directory / SHARDS / f"{shard.name}.json", record.encode())
        return shard

    def _check_in(self, fraction: float | None) -> None:
        if self._progress.stop.is_set():
            raise Stopped
        self._progress.fractions[self._number] = float("nan") if fraction is None else fraction

    def _batches(self, documents: Iterator[tuple[int, str]]) -> Iterator[Batch]:
        """Tokenised; while one batch is written, the next is read and tokenised by a thread."""
        with ThreadPoolExecutor(1) as ahead:
            texts = in_batches(documents, text_of)
            waiting = ahead.submit(self._next, texts)
            while (batch := waiting.result()) is not None:
                waiting = ahead.submit(self._next, texts)
                yield batch

    def _next(self, texts: Iterator[list[tuple[int, str]]]) -> Batch | None:
        numbered = next(texts, None)
        if numbered is None:
            return None
        tokens, lengths = self._tokenizer.encode_joined([text for _, text in numbered])
        regions = np.array([self._split.region(number) for number, _ in numbered])
        sizes = np.array([len(text.encode()) for _, text in numbered], dtype=np.int64)
        return Batch(tokens, lengths, sizes, regions, self._part.skipped, self._part.fraction)
