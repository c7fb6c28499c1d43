"""What a search decided: the candidate of the lowest validation loss, for each value of an axis."""

import json
import math
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from kvpath.series.jobs import Job
from kvpath.series.study import Search, Study
from kvpath.training.run_directory import RunDirectory
from kvpath.training.whole_files import TEMPORARY

FORMAT_VERSION = 1


def decision(study: Study, arm: str, jobs: Sequence[Job], is_changed: Callable[[Job], object]) -> Any | None:
    """The chosen value for `arm`, written to `<run>/search/<arm>.json` when it is first known; None until then.

    A file that lies there and is about the same candidates decides, whether their runs are still there or not.

    Args:
        study: whose search it is.
        arm: a value of the search's axis.
        jobs: all of the study.
        is_changed: whether a run was trained with another configuration, and so is no candidate.
    """
    search = study.search
    assert search is not None
    path, asked = study.run / "search" / f"{arm}.json", _asked(search)
    if path.is_file():
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored.get("asked") == asked:
            return stored["chosen"]
    own = [job for job in jobs if job.candidate and job.candidate[0] == arm]
    if any(map(is_changed, (job for job in own if finished(job.directory)))):
        return None
    candidates = [
        _candidate(value, [job for job in own if (job.candidate or "  ")[1] == str(value)]) for value in search.values
    ]
    if any(loss == "open" for candidate in candidates for loss in candidate["losses"].values()):
        return None
    known = [candidate for candidate in candidates if candidate["mean"] is not None]
    if not known:
        return None
    best = min(known, key=lambda candidate: candidate["mean"])
    numbers = [value for value in search.values if isinstance(value, int | float)]
    edge = len(numbers) > 1 and best["value"] in (min(numbers), max(numbers))
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"format_version": FORMAT_VERSION, search.axis: arm, "chosen": best["value"], "at_the_edge": edge}
    # Several processes may find it out at once: each writes a file of its own, and all the same.
    temporary = path.with_name(f"{path.name}.{platform.node()}-{os.getpid()}{TEMPORARY}")
    temporary.write_text(json.dumps({**found, "asked": asked, "candidates": candidates}, indent=2) + "\n", "utf-8")
    temporary.replace(path)
    return best["value"]


def lines(study: Study, arms: Sequence[str]) -> list[str]:
    """What was chosen, and whether it lies at the edge of what was tried."""
    said = []
    for arm in arms:
        path = study.run / "search" / f"{arm}.json"
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            tried = ", ".join(
                f"{one['value']}: {'diverged' if one['mean'] is None else format(one['mean'], '.4f')}"
                for one in found["candidates"]
            )
            edge = "; it is at the edge of what was tried: widen the search" if found["at_the_edge"] else ""
            said.append(f"search {arm}: {found['chosen']} ({tried}){edge}")
    return said


def _asked(search: Search) -> dict[str, Any]:
    """What makes another search of it."""
    return {
        "set": search.set,
        "values": search.values,
        "stage": search.stage,
        "seeds": [seed.value for seed in search.seeds],
        "change": search.change,
    }


def _candidate(value: Any, jobs: Sequence[Job]) -> dict[str, Any]:
    """One value with the loss of each seed; its mean is None if one of them diverged, or is not known."""
    runs = {job.candidate[2]: job for job in jobs if job.candidate}
    losses = {seed: loss_of(job.directory) for seed, job in runs.items()}
    numbers = [loss for loss in losses.values() if isinstance(loss, float)]
    mean = fmean(numbers) if len(numbers) == len(losses) else None
    return {
        "value": value,
        "mean": mean,
        "losses": losses,
        "runs": [job.directory.relative_to(job.directory.parents[1]).as_posix() for job in runs.values()],
    }


def loss_of(directory: Path) -> float | str | None:
    """The validation loss that a run ended with; None if it diverged, "open" if it has not ended."""
    run = RunDirectory(directory)
    if not finished(directory):
        return None if diverged(run) else "open"
    summary = json.loads(run.summary.read_text(encoding="utf-8"))
    loss = summary.get("metrics", {}).get("validation/loss")
    return loss if loss is not None and math.isfinite(loss) else None


def diverged(run: RunDirectory) -> bool:
    """Whether a run was ended by a loss or gradient that is not finite."""
    if not run.events.is_file():
        return False
    events = [json.loads(line) for line in run.events.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return bool(events) and events[-1].get("action") == "stop"


def finished(directory: Path) -> bool:
    """Whether a run reached the last step that its budget states."""
    summary = directory / "summary.json"
    if not summary.exists():
        return False
    values = json.loads(summary.read_text(encoding="utf-8"))
    return bool(values["step"] >= values["planned_steps"])
