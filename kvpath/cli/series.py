"""`kvpath series run FILE`: the stages of a study in order, each from the weights of the one before.

A series file says where the stages go, the pieces that all share, and the pieces of each stage:

    run: runs/concat
    pieces: [model/98m, attention/kvpath_concat, data/fineweb_edu]
    stages:
      - {name: 2k, pieces: [stage/2k]}
      - {name: 8k, pieces: [stage/8k]}

Stage `2k` is trained in `runs/concat/2k`. What is done is not done again; a stage that was killed goes on.
"""

import argparse
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from kvpath import pieces
from kvpath.cli.arguments import Arguments
from kvpath.errors import TO_BE_RUN_AGAIN, UserError


@dataclass(frozen=True)
class Stage:
    """One run of a series."""

    name: str
    pieces: list[str]


@dataclass(frozen=True)
class Series:
    """Stages in order."""

    run: str
    """Directory under which each stage has its run directory."""

    pieces: list[str]
    """What all stages share."""

    stages: list[Stage]

    @classmethod
    def read(cls, path: Path) -> "Series":
        """Read and check a series file.

        Raises:
            UserError: every problem found, each naming the field and the value.
        """
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"series {path}: {' '.join(str(error).split())}") from error
        UserError.raise_all(f"series {path}: {problem}" for problem in _problems(values))
        return cls(values["run"], values.get("pieces", []), [Stage(**stage) for stage in values["stages"]])


def _problems(values: Any) -> Iterator[str]:
    if not isinstance(values, dict):
        yield f"must hold run, pieces and stages, got {type(values).__name__}"
        return
    yield from _unknown(values, Series, "")
    if not isinstance(values.get("run"), str):
        yield f"run must be a directory, got {values.get('run')!r}"
    yield from _not_pieces(values.get("pieces", []), "pieces")
    stages = values.get("stages")
    if not isinstance(stages, list) or not stages:
        yield f"stages must be a list of at least one stage, got {stages!r}"
        return
    for index, stage in enumerate(stages):
        if not isinstance(stage, dict) or not isinstance(stage.get("name"), str) or "pieces" not in stage:
            yield f"stages[{index}] must have a name and pieces, got {stage!r}"
            continue
        yield from _unknown(stage, Stage, f"stages[{index}].")
        yield from _not_pieces(stage["pieces"], f"stages[{index}].pieces")
    names = [str(stage.get("name")) for stage in stages if isinstance(stage, dict)]
    if len(set(names)) < len(names):
        yield f"stages must have different names, got {', '.join(names)}"


def _unknown(values: dict[str, Any], kind: type, prefix: str) -> Iterator[str]:
    known = [field.name for field in fields(kind)]
    for key in values:
        if key not in known:
            yield f"{prefix}{key} is not a key; there are {', '.join(known)}"


def _not_pieces(value: Any, field: str) -> Iterator[str]:
    if not isinstance(value, list) or not all(isinstance(piece, str) for piece in value):
        yield f"{field} must be a list of pieces, got {value!r}"


def series(argv: list[str]) -> int:
    """Run `kvpath series` with the arguments after the subcommand; gives the exit code.

    Raises:
        UserError: if the series file is wrong, or a piece is not there.
    """
    parser = Arguments(
        "series",
        description=__doc__ or "",
        epilog="Other options override the configuration of every stage, such as --trainer.devices 8.",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=["run", "plan"], help="run the stages, or print their commands")
    parser.add_argument("file", type=Path, help="the series file")
    arguments, overrides = parser.parse_known_args(argv)
    study = Series.read(arguments.file)
    # All of them before the first is run: a piece that is missing is not found out days later.
    commands = list(_commands(study, overrides))
    for directory, command in commands:
        if arguments.action == "plan":
            print(shlex.join(["kvpath", *command]))
        elif finished(directory):
            print(f"{directory}: done", file=sys.stderr)
        elif code := _run(command):
            print(f"{directory}: ended with exit code {code}", file=sys.stderr)
            return code
        elif not finished(directory):
            print(f"{directory}: ended before the last step of its budget; the same command goes on", file=sys.stderr)
            return TO_BE_RUN_AGAIN
    return 0


def _commands(study: Series, overrides: list[str]) -> Iterator[tuple[Path, list[str]]]:
    """The run directory and the command of each stage."""
    start: list[str] = []
    for stage in study.stages:
        directory = Path(study.run) / stage.name
        configs = [f"-c={pieces.resolve(piece)}" for piece in [*study.pieces, *stage.pieces]]
        yield directory, ["fit", *configs, f"--run={directory}", "--ckpt_path=last", *start, *overrides]
        start = [f"--init_from={directory}"]


def _run(command: list[str]) -> int:
    """The exit code of a process of its own, so that launchers can start it anew on every rank."""
    with subprocess.Popen([sys.executable, "-m", "kvpath", *command]) as stage, _passed_on_to(stage):
        code = stage.wait()
    return code if code >= 0 else 128 - code  # as shells have it, for a process that a signal ended


@contextmanager
def _passed_on_to(stage: "subprocess.Popen[bytes]") -> Iterator[None]:
    """What a scheduler tells the series is the stage's to hear: it saves and ends, and then the series does."""
    before = {
        number: signal.signal(number, lambda number, _: stage.send_signal(number))
        for number in (signal.SIGTERM, signal.SIGUSR1)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def finished(directory: Path) -> bool:
    """Whether a run reached the last step that its budget states."""
    summary = directory / "summary.json"
    if not summary.exists():
        return False
    values = json.loads(summary.read_text(encoding="utf-8"))
    return bool(values["step"] >= values["planned_steps"])
