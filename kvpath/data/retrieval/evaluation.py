"""A task at several contexts, and at each of its numbers of keys or depths."""

import hashlib
from dataclasses import dataclass
from typing import Any

from kvpath.data.evaluations import Evaluation
from kvpath.data.packing import IGNORE
from kvpath.data.regions import Region
from kvpath.data.retrieval.examples import Cell, Examples
from kvpath.data.retrieval.task import Task
from kvpath.data.tokenizer import Tokenizer

_TOKENS_AT_A_TIME = 2**20


@dataclass(frozen=True)
class TaskEvaluation(Evaluation):
    """One loader of an evaluation: sequences of a task. What it has in common with a text's, and in addition:

    Args:
        depth: where the passkey stands; None where there is none.
        n_keys: pairs in a sequence; None where there are none.
        whole: an answer is right only if all labels of its sequence are.
        through_cache: the model reads what it is asked from its cache, a token at a time.
    """

    depth: float | None = None
    n_keys: int | None = None
    whole: bool = False
    through_cache: bool = False

    @property
    def task(self) -> str:
        """What results call it."""
        return f"{self.corpus}, through the cache" if self.through_cache else self.corpus

    def stated(self) -> dict[str, Any]:
        """What tells its result from others."""
        return {name: getattr(self, name) for name in ("task", "context", "depth", "n_keys", "fingerprint")}


def task_mixed(task: Task, region: Region, context: int, tokenizer: Tokenizer) -> tuple[TaskEvaluation, Examples]:
    """A region of a task, all that it has mixed as in training.

    Raises:
        UserError: see `Task.examples`.
    """
    return _evaluation(task, task.label, region, context, tokenizer, None, False)


def tasks_at(
    contexts: list[int], task: Task, region: Region, tokenizer: Tokenizer, through_cache: bool, name: str | None = None
) -> list[tuple[TaskEvaluation, Examples]]:
    """A region of a task at several context lengths, and at each of its numbers of keys or depths.

    Args:
        contexts: the lengths.
        task: makes the sequences.
        region: no two regions share sequences.
        tokenizer: whose tokens they are of.
        through_cache: the model is to read what it is asked from its cache.
        name: what to call the task in results; None is its label.

    Raises:
        UserError: see `Task.examples`.
    """
    return [
        _evaluation(task, name or task.label, region, context, tokenizer, cell, through_cache)
        for context in contexts
        for cell in task.cells()
    ]


def _evaluation(
    task: Task, name: str, region: Region, context: int, tokenizer: Tokenizer, cell: Cell | None, through_cache: bool
) -> tuple[TaskEvaluation, Examples]:
    examples = task.examples(tokenizer, region, context, cell)
    found, n_labels = hashlib.sha256(f"{tokenizer.fingerprint}\n".encode()), 0
    at_a_time = max(1, _TOKENS_AT_A_TIME // context)
    for first in range(0, examples.n_windows, at_a_time):
        tokens, labels = examples.batch(list(range(first, min(first + at_a_time, examples.n_windows))))
        found.update(tokens.astype("<i8").tobytes() + labels.astype("<i8").tobytes())
        n_labels += int((labels != IGNORE).sum())
    depth, n_keys = (None, None) if cell is None else (cell.depth, cell.n_keys)
    fingerprint = found.hexdigest()
    # a region of no bytes has no bits per byte
    counted = (context, context, n_labels, 0, fingerprint)
    return TaskEvaluation(name, region, *counted, depth, n_keys, task.whole, through_cache), examples
