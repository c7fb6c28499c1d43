"""Results of `kvpath test`, perplexity or recall, written as they come, so that an interrupted evaluation goes on."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from kvpath.data.cache import digest
from kvpath.data.datamodule import PackedText
from kvpath.data.evaluations import Evaluation
from kvpath.errors import UserError
from kvpath.evaluation.retrieval import task_name
from kvpath.training.module import LanguageModel
from kvpath.training.run_directory import commit
from kvpath.training.say import rank_zero_say
from kvpath.training.stored_config import FORMAT_VERSION, stored_step, to_plain
from kvpath.training.whole_files import write_whole
from kvpath.version import __version__

Entry = dict[str, Any]

IDENTITY = ("run", "step", "corpus", "split", "task", "context", "stride", "depth", "n_keys", "dtype", "fingerprint")
"""An entry replaces the one that agrees with it in all of these, of which each kind of result has its own."""

PARTIAL = ".partial"
"""Ends the name of the file that lies beside the results while an evaluation is unfinished."""


class ResultsFile(Callback):
    """Writes each result as soon as its corpus and context are done; the first rank does.

    Beside the results lies a file ``*.partial`` until the evaluation has ended. It says which weights are evaluated,
    and what of them is done: the same command goes on there if it still finds that file, and otherwise begins anew and
    replaces its own entries.
    """

    def __init__(self, path: Path, run: str, checkpoint: Path) -> None:
        """The results, what the run is called, and the weights' file or directory."""
        self.path, self.run, self.checkpoint = path, run, checkpoint
        self.partial = path.with_name(path.name + PARTIAL)
        self.done: list[list[Any]] = []
        """Identities of this evaluation's entries that are in the file."""
        self._planned: list[list[Any]] = []
        self._weights = ""
        self._common: Entry = {}
        self._written = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave out what is done, and begin the partial file.

        Raises:
            UserError: the results that are there cannot be read.
        """
        if stage != "test" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(pl_module, LanguageModel)
        assert isinstance(data, PackedText)
        self._common = {
            "format_version": FORMAT_VERSION,
            "run": self.run,
            "step": stored_step(self.checkpoint),
            "seed": pl_module.seed,
            "dtype": str(trainer.precision),
            "code_version": commit() or __version__,
        }
        batches = trainer.limit_test_batches
        self._weights = digest(_files(self.checkpoint), to_plain(pl_module.backbone), batches)
        evaluations = data.evaluations["test"]
        self._planned, self._written = [self._identity(evaluation) for evaluation in evaluations], 0
        if trainer.is_global_zero:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.done = self._done_before()[: len(evaluations) - 1]  # Lightning wants something to do
        self.done = trainer.strategy.broadcast(self.done)
        data.leave_out("test", [known for known in evaluations if self._identity(known) in self.done])
        for known in evaluations:
            if self._identity(known) in self.done:
                rank_zero_say(f"{_where(known.stated())}: done before the interruption")
        if trainer.is_global_zero:
            self._write_partial()

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, _: int = 0
    ) -> None:
        """Write what has come."""
        assert isinstance(pl_module, LanguageModel)
        if self._weights and len(pl_module.results) > self._written:
            self._written += 1
            if trainer.is_global_zero:
                self._add({**self._common, **pl_module.results[-1]})

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The evaluation is whole."""
        if self._weights and trainer.is_global_zero:
            self.partial.unlink(missing_ok=True)

    def entries(self) -> list[Entry]:
        """This evaluation's, in their order, whenever they were found."""
        found = {tuple(_identity(entry)): entry for entry in read_entries(self.path)}
        return [found[tuple(wanted)] for wanted in self._planned if tuple(wanted) in found]

    def _identity(self, evaluation: Evaluation) -> list[Any]:
        return _identity({**self._common, **evaluation.stated()})

    def _done_before(self) -> list[list[Any]]:
        """What an interrupted evaluation of the same weights has left, and is wanted now."""
        found = [_identity(entry) for entry in read_entries(self.path)]
        try:
            before = json.loads(self.partial.read_text(encoding="utf-8"))
            done = before["done"] if before["weights"] == self._weights else []
        except (OSError, ValueError, KeyError, TypeError):
            return []
        return [identity for identity in self._planned if identity in done and identity in found]

    def _add(self, entry: Entry) -> None:
        others = [old for old in read_entries(self.path) if not _replaces(entry, old)]
        write_whole(self.path, json.dumps([*others, entry], indent=2) + "\n")
        self.done.append(_identity(entry))
        self._write_partial()
        if len(self._planned) > 1:
            name = "perplexity" if "perplexity" in entry else "accuracy"
            rank_zero_say(f"{_where(entry)}: {name} {entry[name]:.3f} ({len(self.done)} of {len(self._planned)})")

    def _write_partial(self) -> None:
        write_whole(self.partial, json.dumps({"weights": self._weights, "done": self.done}) + "\n")


def read_entries(path: Path) -> list[Entry]:
    """The entries of a file of results; none if there is no such file.

    Raises:
        UserError: it is no such file.
    """
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not a list of results: {error}; move it away, or state another --output") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path} is not a list of results; move it away, or state another --output")
    return entries


def _where(entry: Entry) -> str:
    return f"{task_name(entry) if 'task' in entry else entry['corpus']} at {entry['context']:,}"


def _identity(entry: Entry) -> list[Any]:
    return [entry.get(key) for key in IDENTITY]


def _replaces(entry: Entry, old: Entry) -> bool:
    """Whether they are of one thing; an old entry without a fingerprint may have been."""
    return all(entry.get(key) == old.get(key) or (key == "fingerprint" and key not in old) for key in IDENTITY)


def _files(checkpoint: Path) -> list[list[Any]]:
    """What tells weights from others of the same run and step: the files' names, sizes and times."""
    files = [checkpoint] if checkpoint.is_file() else sorted(path for path in checkpoint.rglob("*") if path.is_file())
    return [[str(path), (stat := path.stat()).st_size, stat.st_mtime_ns] for path in files]
