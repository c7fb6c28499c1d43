"""The runs and tests of a series: where each writes, its command, and what it waits for."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvpath import pieces
from kvpath.series.study import Choice, Search, Settings, Stage, Study, cell_name


@dataclass(frozen=True)
class Job:
    """One command of a series."""

    kind: Literal["fit", "test"]
    cell: str
    """Directory of the cell below the series' own; empty if there are no axes."""

    stage: str
    directory: Path
    """The run directory; a test shares it with its fit."""

    pieces: tuple[Path, ...]
    flags: tuple[str, ...]
    """What goes over the pieces, as on the command line."""

    after: Path | None = None
    """The run whose weights it starts from, or that it tests."""

    search: str | None = None
    """The value of the search's axis whose chosen setting it trains with."""

    candidate: tuple[str, str, str] | None = None
    """For a run of the search: the axis' value, the candidate as text and the seed."""

    @property
    def name(self) -> str:
        """As lines about it begin."""
        return f"{self.directory}{' (test)' if self.kind == 'test' else ''}"

    def command(self, overrides: Sequence[str] = (), chosen: Sequence[str] = ()) -> list[str]:
        """Arguments of `kvpath`; `chosen` are the flags that the search decided on."""
        configs = [f"-c={piece}" for piece in self.pieces]
        if self.kind == "test":
            return ["test", *configs, f"--ckpt_path={self.directory}", *self.flags, *overrides]
        start = [] if self.after is None else [f"--init_from={self.after}"]
        own = [f"--run={self.directory}", "--ckpt_path=last", *start]
        return ["fit", *configs, *own, *self.flags, *chosen, *overrides]

    def line(self, study: Study, overrides: Sequence[str] = ()) -> str:
        """The arguments for a shell, which asks for what the search has chosen when it comes to it."""
        words = [shlex.quote(word) for word in self.command()]
        if self.search is not None and study.search is not None:
            asked = f'"$(kvpath series chosen {shlex.quote(str(study.file))} {shlex.quote(self.search)})"'
            words += [f"--{key}={asked}" for key in study.search.set]
        return " ".join([*words, *map(shlex.quote, overrides)])


def jobs_of(study: Study) -> list[Job]:
    """All of them, in the order in which one worker would do them.

    Raises:
        UserError: a piece is not there.
    """
    searched = list(_candidates(study, study.search)) if study.search else []
    return [*searched, *(job for cell in study.combinations() for job in _cell(study, cell))]


def chosen_flags(search: Search, value: Any) -> list[str]:
    """The flags of a value of the search."""
    return flags_of(dict.fromkeys(search.set, value))


def flags_of(settings: Settings) -> list[str]:
    """Values by dotted key as on the command line."""
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]


def _cell(study: Study, cell: tuple[Choice, ...]) -> Iterator[Job]:
    name = cell_name(cell)
    search, before = study.search, None
    for stage in study.stages:
        job = _fit(study, name, cell, stage, before)
        if search and stage.name == search.stage:
            job = replace(job, search=next(choice.value for choice in cell if choice.axis == search.axis))
        yield job
        before = job.directory
        if study.test and (study.test.after == "each" or stage is study.stages[-1]):
            tested = tuple(map(pieces.resolve, study.test.pieces))
            flags = tuple(flags_of(study.test.set))
            yield Job("test", name, stage.name, job.directory, tested, flags, after=job.directory)


def _fit(study: Study, name: str, cell: Sequence[Choice], stage: Stage, before: Path | None) -> Job:
    named = [*study.pieces, *(piece for choice in cell for piece in choice.pieces), *stage.pieces]
    settings = dict(study.set)
    for over in (*(choice.set for choice in cell), stage.set):
        settings |= over
    directory = study.run / name / stage.name
    return Job(
        "fit", name, stage.name, directory, tuple(map(pieces.resolve, named)), tuple(flags_of(settings)), after=before
    )


def _candidates(study: Study, search: Search) -> Iterator[Job]:
    """For each value of the axis, each seed and each value to choose from a run; stages before it are shared."""
    position = [stage.name for stage in study.stages].index(search.stage)
    earlier, stage = study.stages[:position], study.stages[position]
    short = Stage(stage.name, [*stage.pieces, *search.pieces], {**stage.set, **search.change})
    for arm in searched_choices(study, search):
        cell = next(cell for cell in study.combinations() if arm in cell)
        for seed in search.seeds or [Choice("seed", "", "")]:
            seeded = [*cell, seed]
            base = "-".join(filter(None, [arm.name, seed.name]))
            before: Path | None = None
            for first in earlier:
                job = _fit(study, f"search/{base}", seeded, first, before)
                yield job
                before = job.directory
            for value in search.values:
                setting = Choice("", "", "", set=dict.fromkeys(search.set, value))
                label = f"{search.set[0].rsplit('.', 1)[-1]}{value}"
                name = "-".join(filter(None, [arm.name, label, seed.name]))
                run = replace(short, set={**short.set, **setting.set})
                job = _fit(study, f"search/{name}", seeded, run, before)
                yield replace(job, candidate=(arm.value, str(value), seed.value))


def searched_choices(study: Study, search: Search) -> list[Choice]:
    """The values of the search's axis that some cell has."""
    used = {choice.value for cell in study.combinations() for choice in cell if choice.axis == search.axis}
    return [choice for choice in study.axes[search.axis] if choice.value in used]
