"""Training batches from a source too large to keep: tokenised and packed while it is read."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from kvpath.data.budget import Plan
from kvpath.data.corpus import Split, encode_documents, in_batches
from kvpath.data.loaders import Batch, iter_batches, say_epoch
from kvpath.data.sources import Source
from kvpath.data.tokenizer import Tokenizer
from kvpath.errors import UserError


class StreamLoader:
    """The training documents in their own order, packed without loss; from the front again when they end.

    Windows are not shuffled. Each rank and each worker reads the whole source and keeps its own part, and a resume
    reads and tokenises again what came before: exact for any number of ranks, but slow.

    Args:
        source: where the documents come from.
        tokenizer: makes tokens of them.
        split: its ``rest`` is what is trained on.
        plan: how steps are made up.
        rank: this rank.
        steps: the steps still to run, asked for at the start of each iteration.
        num_workers: processes that read ahead, each taking every so many steps.
        start_tokens: tokens at the front that are passed over.
        repeat: begin again when the documents end; otherwise that is an error.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        split: Split,
        plan: Plan,
        rank: int,
        steps: Callable[[], range],
        num_workers: int = 0,
        start_tokens: int = 0,
        repeat: bool = True,
    ) -> None:
        self._source, self._tokenizer, self._split = source, tokenizer, split
        self._plan, self._rank, self._steps, self._num_workers = plan, rank, steps, num_workers
        self._start_tokens, self._repeat = start_tokens, repeat

    def __len__(self) -> int:
        return self._plan.steps

    def __iter__(self) -> Iterator[Batch]:
        dataset = _StepStream(
            self._source,
            self._tokenizer,
            self._split,
            self._plan,
            self._rank,
            self._steps(),
            self._start_tokens,
            self._repeat,
        )
        return iter_batches(dataset, self._num_workers)

    # Lightning warns of a loader without these two when a run resumes.
    def state_dict(self) -> dict[str, int]:
        """Nothing: the step at which training goes on says everything."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Nothing."""


class _StepStream(IterableDataset[Batch | UserError]):
    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        split: Split,
        plan: Plan,
        rank: int,
        steps: range,
        start_tokens: int,
        repeat: bool,
    ) -> None:
        self._source, self._tokenizer, self._split = source, tokenizer, split
        self._plan, self._rank, self._steps = plan, rank, steps
        self._start_tokens, self._repeat = start_tokens, repeat

    def __iter__(self) -> Iterator[Batch | UserError]:
        worker = get_worker_info()
        # the loader takes from the workers in turn
        steps = self._steps[worker.id :: worker.num_workers] if worker else self._steps
        if not steps:
            return
        try:
            for step, tokens in enumerate(self._tokens_of_steps(says_epochs=worker is None or worker.id == 0)):
                if step in steps:
                    yield self._own_part(tokens)
                if step >= steps[-1]:
                    return
        except UserError as error:
            yield error

    def _own_part(self, tokens: NDArray[np.int64]) -> Batch:
        """This rank's batch out of the tokens of a step, (tokens_per_step + 1,)."""
        plan = self._plan
        n = plan.sequences_per_rank * plan.seq_len
        own = torch.from_numpy(tokens[self._rank * n : (self._rank + 1) * n + 1])
        shape = (plan.accumulation, plan.micro_batch, plan.seq_len)
        return {"tokens": own[:-1].reshape(shape), "labels": own[1:].reshape(shape)}

    def _tokens_of_steps(self, says_epochs: bool) -> Iterator[NDArray[np.int64]]:
        """The tokens of each step from the first on, and one more, which is the next step's first."""
        n = self._plan.tokens_per_step
        waiting: list[NDArray[np.int64]] = []
        n_waiting = n_made = 0
        skip = self._start_tokens
        for epoch in itertools.count():
            step = n_made + n_waiting // n
            if epoch and not self._repeat:
                raise UserError(
                    f"source {self._source.label} ends in step {n_made + 1} of {self._plan.steps},"
                    f" before data.budget.tokens {self._plan.tokens}; data.repeat: true begins a second epoch"
                )
            if epoch and not skip and says_epochs and self._rank == 0 and step in self._steps:
                say_epoch(epoch, step)
            for ids in self._documents():
                skip, ids = max(0, skip - len(ids)), ids[skip:]
                waiting.append(ids)
                n_waiting += len(ids)
                if n_waiting > n:
                    tokens = np.concatenate(waiting)
                    while len(tokens) > n:
                        yield tokens[: n + 1].copy()
                        n_made += 1
                        tokens = tokens[n:]
                    waiting, n_waiting = [tokens], len(tokens)

    def _documents(self) -> Iterator[NDArray[np.int64]]:
        """The tokens of each training document, once through the source."""
        found = False
        for texts in in_batches(self._split.documents(self._source, "train")):
            found = True
            yield from encode_documents(self._tokenizer, texts)
        if not found:
            raise UserError(f"source {self._source.label}: no document is left to train on")
