"""How far each job of a series is, from what lies in its directory."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvpath import pieces
from kvpath.cli.composing import Composer
from kvpath.errors import UserError
from kvpath.series.jobs import Job, chosen_flags, jobs_of
from kvpath.series.search import decision, diverged, finished, loss_of
from kvpath.series.study import Study
from kvpath.training.metrics_file import read_metrics
from kvpath.training.run_directory import RunDirectory
from kvpath.training.run_lock import LOCK, holder
from kvpath.training.whole_files import write_whole

WORKER_LOCK = ".series.lock"
LOG = "log.txt"
_FAILED = "failed.json"
_TESTED = "tested.json"

Word = Literal["done", "diverged", "changed", "running", "failed", "stopped", "waiting", "to do"]


@dataclass(frozen=True)
class State:
    """One word, and what more there is to say."""

    word: Word
    detail: str = ""


class Progress:
    """Looks at the directories of a series; whether a configuration changed is found out once for each run."""

    def __init__(self, study: Study, overrides: Sequence[str] = ()) -> None:
        """All jobs of a study, with what the command line puts over its configurations.

        Raises:
            UserError: a piece is not there.
        """
        self.study = study
        self.overrides = list(overrides)
        self.jobs = jobs_of(study)
        self.ours: set[Path] = set()
        """Directories that this process works in: to look at a lock of one's own is to let go of it."""
        self._composer = Composer()
        self._changed: dict[tuple[Path, tuple[str, ...]], str] = {}
        self._fits = {job.directory: job for job in self.jobs if job.kind == "fit"}

    def command(self, job: Job) -> list[str] | None:
        """The arguments of `kvpath`; None while the search is undecided."""
        chosen = self.chosen(job)
        return None if chosen is None else job.command(self.overrides, chosen)

    def chosen(self, job: Job) -> list[str] | None:
        """The flags that the search decided on for a job; none if it is not about it; None while it is undecided."""
        if job.search is None or self.study.search is None:
            return []
        value = self.decision(job.search)
        return None if value is None else chosen_flags(self.study.search, value)

    def decision(self, arm: str) -> Any | None:
        """What the search chose for a value of its axis; None while it is undecided."""
        return decision(self.study, arm, self.jobs, self.changed_key)

    def state(self, job: Job) -> State:
        """What there is to say of one of `jobs`."""
        if job.kind == "test":
            return self._of_test(job)
        run = RunDirectory(job.directory)
        trained = finished(job.directory)
        begun = trained or run.last.exists() or run.previous.exists()
        if by := self.owner(job):
            return State("running", by)
        if begun and (key := self.changed_key(job)):
            return State("changed", key)
        if trained:
            return State("done")
        if job.candidate and diverged(run):
            return State("diverged")
        if failed := _failed(job):
            return State("failed", failed)
        if waits := self._waits(job):
            return State("waiting", waits)
        return State("stopped" if begun else "to do")

    def owner(self, job: Job, of: Sequence[str] = (LOCK, WORKER_LOCK)) -> str | None:
        """The other process that works in a job's directory."""
        if job.directory in self.ours:
            return None
        return next(filter(None, (holder(job.directory / name) for name in of)), None)

    def changed_key(self, job: Job) -> str:
        """What differs between the stored configuration of a run and the file of the series, in words; "" if nothing.

        A stage whose weights came from a run that is gone, or has changed, counts as changed, too.
        """
        if job.after is not None and not finished(job.after):
            return f"the stage before it, {job.after}, is not finished"
        if job.after is not None and (before := self.changed_key(self._fits[job.after])):
            return f"in the stage before it, {before}"
        if (command := self.command(job)) is None:
            return ""
        key = (job.directory, tuple(command))
        config = RunDirectory(job.directory).config
        if key not in self._changed and config.is_file():
            found = self._composer.changed(config.read_text(encoding="utf-8"), command)
            self._changed[key] = "; ".join(f"{name} was {old} and is now {new}" for name, (old, new) in found.items())
        return self._changed.get(key, "")

    def composed(self, job: Job) -> dict[str, Any]:
        """The complete configuration of a fit; with the search's first value while it is undecided.

        Raises:
            UserError: naming the run, the key, the value and what would be right.
        """
        search = self.study.search
        chosen = self.chosen(job)
        if chosen is None and search is not None:
            chosen = chosen_flags(search, search.values[0])
        try:
            return self._composer.values(job.command(self.overrides, chosen or ()))
        except UserError as error:
            raise UserError(f"{job.directory}: {error}") from error

    def loss(self, job: Job) -> float | None:
        """The validation loss a run ended with, or the last there is of one that goes on."""
        run = RunDirectory(job.directory)
        if finished(job.directory):
            loss = loss_of(job.directory)
            return loss if isinstance(loss, float) else None
        lines = read_metrics(run.metrics) if run.metrics.is_file() else []
        return next((line["validation/loss"] for line in reversed(lines) if line.get("validation/loss")), None)

    def step(self, job: Job) -> int:
        """The last step that a run wrote down; 0 if there is none."""
        run = RunDirectory(job.directory)
        lines = read_metrics(run.metrics) if run.metrics.is_file() else []
        return max((int(line.get("step") or 0) for line in lines), default=0)

    def _of_test(self, job: Job) -> State:
        fit = self.state(self._fits[job.directory])
        if fit.word == "running":
            return State("running" if finished(job.directory) else "waiting", fit.detail)
        if fit.word != "done":
            return State("waiting", f"for {job.directory}")
        if self._tested(job):
            return State("done")
        if failed := _failed(job):
            return State("failed", failed)
        return State("to do")

    def _waits(self, job: Job) -> str:
        if job.after is not None and (not finished(job.after) or self.changed_key(self._fits[job.after])):
            return f"for {job.after}"
        return f"for the search of {job.search}" if self.chosen(job) is None else ""

    # What a worker leaves ---------------------------------------------------------------------------------------------

    def _tested(self, job: Job) -> bool:
        path, step = job.directory / _TESTED, _step(job.directory)
        if path.is_file():
            stored = json.loads(path.read_text(encoding="utf-8"))
            return bool(stored == {"asked": self._asked(job), "step": step})
        results = job.directory / "perplexity.json"  # of a test that was started otherwise
        return results.is_file() and any(
            one.get("step") == step for one in json.loads(results.read_text(encoding="utf-8"))
        )

    def _asked(self, job: Job) -> Any:
        """What a test is about, as JSON has it."""
        return json.loads(json.dumps(pieces.compose(job.pieces, job.flags)))

    def note_tested(self, job: Job) -> None:
        """A test is done."""
        text = json.dumps({"asked": self._asked(job), "step": _step(job.directory)}, indent=2)
        write_whole(job.directory / _TESTED, text + "\n")


def note_failed(job: Job, code: int, last_line: str) -> None:
    """A job has ended with an exit code that is not 0."""
    job.directory.mkdir(parents=True, exist_ok=True)
    values = {"kind": job.kind, "code": code, "last_line": last_line, "time": time.time()}
    write_whole(job.directory / _FAILED, json.dumps(values) + "\n")


def forget_failure(job: Job) -> None:
    """A job is begun again."""
    (job.directory / _FAILED).unlink(missing_ok=True)


def failed_at(job: Job) -> float | None:
    """When a job failed, in seconds since 1970; None if it did not."""
    values = _failure(job)
    return None if values is None else float(values["time"])


def _failed(job: Job) -> str:
    values = _failure(job)
    return "" if values is None else f"exit code {values['code']}: {values['last_line']}"


def _failure(job: Job) -> dict[str, Any] | None:
    path = job.directory / _FAILED
    if not path.is_file():
        return None
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values if values["kind"] == job.kind else None


def _step(directory: Path) -> int:
    return int(json.loads(RunDirectory(directory).summary.read_text(encoding="utf-8"))["step"])
