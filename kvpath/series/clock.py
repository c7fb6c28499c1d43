"""How far a series is, how fast it goes, and how long it still takes."""

import sys
import time

from kvpath import pieces
from kvpath.series.jobs import Job
from kvpath.series.state import Progress


class Clock:
    """Says so when a job begins and ends; silent in a series of one cell, whose runs speak for themselves."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._speaks = any(job.cell for job in progress.jobs)
        self._tokens: dict[Job, float] = {}
        self._began: dict[Job, tuple[float, int]] = {}
        self._start = time.monotonic()
        self._trained = 0.0
        """Tokens, since the clock started."""

    def begin(self, job: Job) -> None:
        """A job is started."""
        if not self._speaks:
            return
        step = self._progress.step(job) if job.kind == "fit" else 0
        self._began[job] = (time.monotonic(), step)
        self._say(f"{job.name}: begins" + (f" again after step {step:,}" if step else ""))

    def end(self, job: Job) -> None:
        """A job is done."""
        if not self._speaks:
            return
        began, step = self._began[job]
        loss = self._progress.loss(job) if job.kind == "fit" else None
        if job.kind == "fit":
            steps = max(1, self._progress.step(job))
            self._trained += self._of(job) * max(0.0, 1 - step / steps)
        cells = {other.cell for other in self._progress.jobs}
        words = {other: self._progress.state(other).word for other in self._progress.jobs}
        open_jobs = {other for other, word in words.items() if word not in ("done", "diverged")}
        left = sum(self._of(other) for other in open_jobs if other.kind == "fit")
        rate = self._trained / max(1e-9, time.monotonic() - self._start)
        said = [f"{job.name}: done in {spoken(time.monotonic() - began)}"]
        said += [] if loss is None else [f"validation loss {loss:.4f}"]
        said += [f"{len(cells - {other.cell for other in open_jobs})} of {len(cells)} cells"]
        said += [f"{rate:,.0f} tokens/s in all"] if rate else []
        said += [f"about {spoken(left / rate)} left"] if rate and left else []
        self._say(" · ".join(said))

    def _of(self, job: Job) -> float:
        """Tokens of a run."""
        if job not in self._tokens:
            # As the pieces have it: to compose all of it takes a while for many runs.
            values = pieces.compose(job.pieces, [*job.flags, *self._progress.overrides])
            self._tokens[job] = float(((values.get("data") or {}).get("budget") or {}).get("tokens") or 0)
        return self._tokens[job]

    @staticmethod
    def _say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def spoken(seconds: float) -> str:
    """A length of time for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86400:.1f} days"
