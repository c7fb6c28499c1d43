"""Processes that read ahead, and what is said when one of them dies."""

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from kvpath.errors import UserError


def read_ahead(
    dataset: Dataset[Any], num_workers: int, sampler: Any = None, prefetch: int | None = None
) -> Iterator[Any]:
    """What the dataset makes, whole, in its order.

    Args:
        dataset: makes batches; a UserError in place of one is raised here.
        num_workers: processes that read ahead; 0 reads in this one.
        sampler: what to ask the dataset for, unless it iterates by itself.
        prefetch: batches that each process reads ahead.

    Raises:
        UserError: one that the dataset gives instead of a batch (raised in a worker, it would come with a traceback),
            or that says which worker died.
    """
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=num_workers,
        prefetch_factor=prefetch if num_workers else None,
        worker_init_fn=_begin,
        pin_memory=torch.cuda.is_available(),
        # of its own: otherwise each iteration would draw from the global random state
        generator=torch.Generator(),
    )
    try:
        for batch in loader:
            if isinstance(batch, UserError):
                raise batch
            yield batch
    except RuntimeError as error:
        raise dead_worker(error) or error from error.__cause__


def _begin(worker: int) -> None:
    """What a process that reads ahead must not have from the one that forked it, or share with it."""
    # The tokenizer's threads stayed behind, and would be waited for for ever.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A scheduler tells all processes to end, and a terminal too: this one does when the run is gone.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def dead_worker(error: RuntimeError) -> UserError | None:
    """One clear line if torch's error says that a worker died. It may be raised wherever the main process is."""
    found = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is |exited )([^.\n]*)", str(error))
    if found is None:
        return None
    why = "the usual reason is too little memory; lower data.num_workers, or ask for more memory"
    if "Bus error" in found[2]:
        why = "the usual reasons are a file of the data that was cut off while it was read, and no room in /dev/shm"
    return UserError(f"data worker with process number {found[1]} died ({found[2].strip()}): {why}")
