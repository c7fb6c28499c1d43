"""`kvpath series submit`: what is left to do, as SLURM arrays of which each waits for the one before."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvpath.errors import UserError
from kvpath.series.jobs import Job
from kvpath.series.state import Progress
from kvpath.series.worker import changed_line
from kvpath.training.whole_files import write_whole


@dataclass(frozen=True)
class Array:
    """Commands that do not wait for each other, one a task.

    Args:
        name: of the stage, or of its test.
        file: has the arguments of task N in line N, from 0; an empty line is done.
        commands: its lines.
        after: the array it waits for; None for none.
        by_task: whether task N waits for task N of that array alone, and not for all of its tasks.
    """

    name: str
    file: Path
    commands: list[str]
    after: str | None = None
    by_task: bool = True


def submit(progress: Progress, options: str = "", dry_run: bool = False) -> int:
    """Write the files of commands, and hand them to `sbatch` with `scripts/launch/slurm.sbatch`; gives the exit code.

    Args:
        progress: the series.
        options: more for sbatch, as a shell has them.
        dry_run: print what would be called.

    Raises:
        UserError: a run's configuration has changed, there is no sbatch or no script, or sbatch refuses.
    """
    states = {job: progress.state(job) for job in progress.jobs}
    UserError.raise_all(
        f"{job.name}: {changed_line(state.detail)}" for job, state in states.items() if state.word == "changed"
    )
    if running := [job.name for job, state in states.items() if state.word == "running"]:
        raise UserError(f"there are runs at work, which would be started twice: {', '.join(running)}")
    script = _script()
    if shutil.which("sbatch") is None and not dry_run:
        raise UserError("there is no sbatch here; --dry-run prints what it would be called with")
    numbers: dict[str, str] = {}
    for array in arrays(progress):
        after = numbers.get(array.after or "")
        kind = "aftercorr" if array.by_task else "afterany"  # a candidate that diverges has failed, for SLURM
        depends = [] if after is None else [f"--dependency={kind}:{after}"]
        command = [
            *("sbatch", "--parsable", f"--job-name={array.name}", f"--array=0-{len(array.commands) - 1}", *depends),
            *(f"--export=ALL,TASKS={array.file.resolve()}", f"--output={array.file.parent.resolve()}/%x-%A_%a.out"),
            *(*shlex.split(options), str(script)),
        ]
        array.file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(array.file, "".join(f"{line}\n" for line in array.commands))
        if dry_run:
            print(shlex.join(command))
            numbers[array.name] = f"<{array.name}>"
        else:
            numbers[array.name] = _submitted(command)
            print(f"{array.name}: job {numbers[array.name]}, {len(array.commands)} tasks, {array.file}")
    if not numbers:
        print("all is done")
    return 0


def arrays(progress: Progress) -> Iterator[Array]:
    """One for the candidates of a search and for each stage before theirs, one for each stage and each test."""
    left = [job for job in progress.jobs if progress.state(job).word not in ("done", "diverged")]
    before: str | None = None
    for searching in (True, False):
        cells = list(dict.fromkeys(job.cell for job in left if _of_search(job) == searching))
        own = [job for job in progress.jobs if job.cell in cells]
        # Candidates share the runs of stages before theirs, and cells share candidates: the numbers are not the same.
        by_task = False
        for kind, stage in dict.fromkeys((job.kind, job.stage) for job in own):
            jobs = {job.cell: job for job in own if (job.kind, job.stage) == (kind, stage)}
            name = f"{'search-' * searching}{stage}"
            if kind == "test":
                name, after = f"{name}-test", name
            else:
                before, after = name, before
            lines = [_line(progress, jobs.get(cell), left) for cell in cells]
            file = progress.study.run / "slurm" / f"{name}.tasks"
            yield Array(name, file, lines, after, by_task or kind == "test")
            by_task = not searching


def _line(progress: Progress, job: Job | None, left: list[Job]) -> str:
    return "" if job is None or job not in left else job.line(progress.study, progress.overrides)


def _of_search(job: Job) -> bool:
    return job.cell.startswith("search/")


def _script() -> Path:
    here = Path(__file__).parents[2] / "scripts" / "launch" / "slurm.sbatch"
    script = Path(os.environ.get("KVPATH_SBATCH_SCRIPT", here))
    if not script.is_file():
        raise UserError(f"{script}: there is no such script; KVPATH_SBATCH_SCRIPT names a copy of launch/slurm.sbatch")
    return script


def _submitted(command: list[str]) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise UserError(f"sbatch refused with exit code {ended.returncode}: {' '.join(ended.stderr.split())}")
    return ended.stdout.strip().split(";")[0]
