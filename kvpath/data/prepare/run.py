"""``kvpath prepare``: any source, tokenised on all cores into a folder of shards (see `kvpath.data.shards`).

The parts of the source are dealt to workers. Each makes the shards of its part in order, whole files under their final
names, and a record of each when it is done; the manifest is written by whoever finds that none is missing. It is a
function of the records alone, so it does not matter who that is, nor whether two do it at once.
"""

import dataclasses
import errno
import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from kvpath.data.cache import write_atomically
from kvpath.data.prepare import worker
from kvpath.data.prepare.job import Job, alone
from kvpath.data.prepare.watch import Watch
from kvpath.data.prepare.worker import Progress, Stopped, found_shard
from kvpath.data.regions import Split, dtype_of
from kvpath.data.shards import (
    FORMAT_VERSION,
    MANIFEST,
    PLAN,
    SHARDS,
    TOKENIZER,
    Shard,
    ShardFolder,
    ShardPlan,
    manifest_of,
    read_json,
)
from kvpath.data.sources import Source
from kvpath.data.tokenizer import Tokenizer
from kvpath.errors import UserError

SHARD_BYTES = 4 * 2**30
"""Text of a shard: about a billion tokens, so that 100 billion lie in a hundred files."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def plan_shards(
    source: Source,
    parts: int,
    tokenizer: Tokenizer,
    tokenizer_name: str,
    holdout_every: int | None = None,
    max_tokens: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> ShardPlan:
    """All that decides the bytes of a folder of shards.

    Args:
        source: what to tokenise.
        parts: how many it has.
        tokenizer: makes the tokens.
        tokenizer_name: what the configuration calls it.
        holdout_every: of every so many documents one is for validation and one for testing.
        max_tokens: training tokens to prepare, an equal share from each part; None takes all.
        shard_bytes: a shard ends once it holds so much text.

    Raises:
        UserError: for numbers that cannot be.
    """
    Split(holdout_every)
    if max_tokens is not None and max_tokens < 1:
        raise UserError(f"data.max_tokens must be at least 1 or null, got {max_tokens}")
    return ShardPlan(
        format_version=FORMAT_VERSION,
        source=source.fingerprint(),
        label=source.label,
        tokenizer=tokenizer.fingerprint,
        tokenizer_name=tokenizer_name,
        end_of_text=tokenizer.end_of_text_token,
        vocab_size=tokenizer.vocab_size,
        holdout_every=holdout_every,
        max_tokens=max_tokens,
        dtype=dtype_of(tokenizer.vocab_size),
        n_parts=parts,
        shard_bytes=shard_bytes,
    )


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    plan: ShardPlan,
    directory: Path,
    workers: int | None = None,
    job: Job | None = None,
) -> ShardFolder | None:
    """Make what is missing of a folder of shards.

    Args:
        source: what to tokenise.
        tokenizer: makes the tokens.
        plan: of ``plan_shards``.
        directory: the folder, new or begun with the same plan.
        workers: processes; by default as many as there are cores. They share the cores, and change no byte.
        job: makes only its share of the parts; by default all.

    Returns:
        the finished folder, or None if shards of other jobs are still missing.

    Raises:
        UserError: the folder was begun otherwise, another process is at work in it, a document cannot be read, or the
            disk is full.
    """
    share = job or Job()
    with _no_room_said(directory, None):
        for name in (SHARDS, *plan.regions):
            (directory / name).mkdir(parents=True, exist_ok=True)
        with alone(directory, job):
            _agree(directory, plan, tokenizer)
            own = [part for part in range(plan.n_parts) if share.has(part)]
            _remove_leftovers(directory, own if job else None)
            missing = [part for part in own if _shards_of(directory, plan, part) is None]
            if missing:
                _make_parts(source, tokenizer, plan, directory, job, missing, workers or n_cores())
            return _finish(directory, plan)


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _agree(directory: Path, plan: ShardPlan, tokenizer: Tokenizer) -> None:
    """Write the plan, or compare it with the one that is there."""
    path = directory / PLAN
    if path.exists():
        now = dataclasses.asdict(plan)
        begun = read_json(path, "a plan of shards")
        UserError.raise_all(
            f"{directory} was begun with {name} {begun.get(name)}, which is now {now[name]}: take another --output, or"
            " delete that folder"
            for name in now
            if begun.get(name) != now[name]
        )
    else:
        tokenizer.save(directory / TOKENIZER)
        write_atomically(path, (json.dumps(dataclasses.asdict(plan), indent=1) + "\n").encode())


def _remove_leftovers(directory: Path, parts: list[int] | None) -> None:
    """What a killed attempt was writing."""
    for pattern in ("*/*.part", "*/.*.part", ".*.part"):
        for path in directory.glob(pattern):
            stem = path.name.lstrip(".").split("-", 1)[0]
            if parts is None or (stem.isdecimal() and int(stem) in parts):
                path.unlink(missing_ok=True)


def _shards_of(directory: Path, plan: ShardPlan, part: int) -> list[Shard] | None:
    """All shards of a part, if none is missing."""
    shards = []
    for number in count():
        shard = found_shard(directory, plan, part, number)
        if shard is None:
            return None
        shards.append(shard)
        if shard.last:
            return shards
    return None


def _finish(directory: Path, plan: ShardPlan) -> ShardFolder | None:
    shards: list[Shard] = []
    for part in range(plan.n_parts):
        found = _shards_of(directory, plan, part)
        if found is None:
            return None
        shards += found
    content = json.dumps(manifest_of(plan, shards), indent=1) + "\n"
    write_atomically(directory / MANIFEST, content.encode())
    return ShardFolder(directory)


def _make_parts(
    source: Source,
    tokenizer: Tokenizer,
    plan: ShardPlan,
    directory: Path,
    job: Job | None,
    parts: list[int],
    workers: int,
) -> None:
    """Deal parts to worker processes, and watch them."""
    # Forked from a process that only imported: neither threads nor locks of this one are inherited.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([worker.__name__])
    workers = min(workers, len(parts))
    fractions = context.Array("d", plan.n_parts)
    progress = Progress(context.Array("q", 4), fractions, context.Event())
    for part in set(range(plan.n_parts)) - set(parts):
        fractions[part] = 1.0
    sizes = [part.n_bytes for part in source.parts()]
    watch = Watch(progress, [sizes[part] for part in parts], parts)
    threads = max(1, n_cores() // workers)
    given = (source, tokenizer, plan, directory, job, progress, threads)
    with (
        _no_room_said(directory, watch),
        ProcessPoolExecutor(workers, context, worker.begin, given) as pool,
    ):
        futures = [pool.submit(worker.make_part, part) for part in parts]
        try:
            _watch(futures, watch)
        finally:
            progress.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _watch(futures: list["Future[None]"], watch: Watch) -> None:
    """Say how far it is, every so often, until all is done.

    Raises:
        whatever a worker raised first.
    """
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, timeout=watch.seconds, return_when=FIRST_EXCEPTION)
        watch.say()
        # one that failed makes others stop
        failures = [error for future in done if (error := future.exception()) is not None]
        for error in sorted(failures, key=lambda error: isinstance(error, Stopped | BrokenProcessPool)):
            if isinstance(error, BrokenProcessPool):
                raise UserError(
                    "a worker process was killed, most often for want of memory: take fewer --workers; the same"
                    " command goes on with what is done"
                ) from error
            raise error
    watch.say(at_end=True)


@contextmanager
def _no_room_said(directory: Path, watch: Watch | None) -> Iterator[None]:
    """Turn a full disk into one line that names what is needed."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        needed = watch.bytes_left if watch else None
        about = f"; about {needed:,} bytes more are needed" if needed else ""
        raise UserError(
            f"cannot write to {directory}: {os.strerror(error.errno or 0)}{about}; make room, and the same command goes"
            " on with what is done"
        ) from error
