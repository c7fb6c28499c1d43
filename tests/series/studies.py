"""A study of a toy, and a stand-in for `kvpath` that trains nothing."""

import json
from pathlib import Path
from typing import Any

import yaml

from kvpath.series.jobs import Job
from kvpath.series.state import Progress
from kvpath.series.study import Study
from tests.runs import write_config

STAND_IN = """#!/usr/bin/env bash
# writes down that it began and that it ended; a run reaches its last step, unless its name is in FAIL or HANG
kind=$1
for word in "$@"; do
    case $word in
        --run=*) run=${word#--run=} ;;
        --ckpt_path=*/*) run=${word#--ckpt_path=} ;;
    esac
done
hangs=
if [[ -n ${HANG-} && $run == *$HANG* ]]; then
    hangs=yes
    trap 'echo "told $kind $run" >> "$LOG"; exit 75' TERM
fi
echo "begins $kind $run $*" >> "$LOG"
if [[ -n ${FAIL-} && $run == *$FAIL* ]]; then echo "some line"; echo "kvpath: error: it would not" >&2; exit 2; fi
while [[ -n $hangs ]]; do sleep 0.02; done
sleep "${SLOW-0}"
if [[ $kind == fit ]]; then
    loss=$(grep -o "${run#"$STUDY/"} .*" "$LOSSES" 2> /dev/null | cut -d' ' -f2)
    echo '{"step": 6, "planned_steps": 6, "metrics": {"validation/loss": '"${loss:-3.5}"'}}' > "$run/summary.json"
fi
echo "ends $kind $run" >> "$LOG"
"""

AXES: dict[str, Any] = {
    "layout": {"gqa": None, "wide": {"set": {"model.backbone.d_ff": 32}}},
    "seed": {"set": ["model.seed", "data.seed"], "values": [1, 2]},
}
STAGES = [{"name": "short", "pieces": []}, {"name": "long", "pieces": [], "set": {"data.budget.tokens": 512}}]


def write_study(folder: Path, **changes: Any) -> Path:
    """Two layouts, two seeds, two stages; None for a key leaves it out."""
    values = {
        "run": str(folder / "study"),
        "pieces": [str(write_config(folder, data__shuffle_block=64))],
        "axes": AXES,
        "stages": STAGES,
    }
    path = folder / "study.yaml"
    kept = {key: value for key, value in {**values, **changes}.items() if value is not None}
    path.write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")
    return path


def progress_of(folder: Path, *overrides: str, **changes: Any) -> Progress:
    """As a process that has just been started sees it."""
    return Progress(Study.read(write_study(folder, **changes)), overrides)


def finish(run: Path, step: int = 6, planned: int = 6, loss: float | None = 3.5) -> None:
    """What a run leaves that has reached `step`."""
    run.mkdir(parents=True, exist_ok=True)
    metrics = {} if loss is None else {"validation/loss": loss}
    values = {"step": step, "planned_steps": planned, "metrics": metrics}
    (run / "summary.json").write_text(json.dumps(values), encoding="utf-8")


def job_of(progress: Progress, cell: str, stage: str, kind: str = "fit") -> Job:
    """The one of this name."""
    (job,) = [job for job in progress.jobs if (job.cell, job.stage, job.kind) == (cell, stage, kind)]
    return job
