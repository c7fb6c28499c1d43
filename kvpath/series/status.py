"""`kvpath series status`: a table of cells and stages."""

from collections import Counter

from kvpath.analysis.tables import Cell, table
from kvpath.series.jobs import Job
from kvpath.series.search import lines
from kvpath.series.state import Progress, State


def status(progress: Progress) -> str:
    """One row a cell, a column a stage; below it what failed, what has changed, and what was chosen."""
    states = {job: progress.state(job) for job in progress.jobs}
    cells: dict[str, dict[str, Cell]] = {}
    for job, state in states.items():
        row = cells.setdefault(job.cell, {"cell": job.cell or progress.study.run.name})
        column = job.stage if job.kind == "fit" else f"test {job.stage}"
        row[column] = _short(progress, job, state)
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    rows = [{column: row.get(column, "") for column in columns} for row in cells.values()]
    counts = Counter(state.word for state in states.values())
    summed = ", ".join(f"{count} {word}" for word, count in counts.items())
    said = [f"{job.name}: {state.word}: {state.detail}" for job, state in states.items() if _is_explained(state)]
    arms = list(dict.fromkeys(job.search for job in progress.jobs if job.search))
    return "\n".join([table(rows), "", f"{len(states)} runs and tests: {summed}", *said, *lines(progress.study, arms)])


def _is_explained(state: State) -> bool:
    return state.word in ("failed", "changed")


def _short(progress: Progress, job: Job, state: State) -> str:
    said: str = state.word
    if job.kind == "fit" and state.word in ("running", "stopped"):
        said += f", step {progress.step(job):,}"
    if job.kind == "fit" and state.word not in ("to do", "waiting") and (loss := progress.loss(job)) is not None:
        said += f" {loss:.4f}"
    return said
