"""The file of a series, read and checked.

    run: runs/study                       # everything lies below it
    pieces: [model/98m, data/fineweb_edu] # what all runs share
    axes:                                 # a cell for each combination, called gqa-seed1
      layout:
        gqa: {pieces: [attention/gqa]}
        concat: {pieces: [attention/kvpath_concat], set: {model.z_loss: 0.0001}}
      seed: {set: [model.seed, data.seed], values: [1, 2, 3]}
    except: [{layout: concat, seed: 3}]   # or only: these combinations alone
    stages:                               # each from the weights of the one before: runs/study/gqa-seed1/2k
      - {name: 2k, pieces: [stage/2k]}
    search:                               # per value of an axis; the best is what its cells train with
      set: model.optimizer.learning_rate
      values: [3e-4, 1e-3, 3e-3]
      stage: 2k
      axis: layout
      seeds: {set: [model.seed, data.seed], values: [101]}
      change: {data.budget.tokens: 1e9}   # what else differs from the stage
    test: {pieces: [eval/paper], after: last}

Without axes the stages lie directly below `run`.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from kvpath import pieces
from kvpath.errors import UserError

Settings = dict[str, Any]
"""Values by dotted key, as the command line has them."""


@dataclass(frozen=True)
class Choice:
    """One value of an axis."""

    axis: str
    value: str
    """As `only` and `except` call it."""

    name: str
    """As directories call it."""

    pieces: list[str] = field(default_factory=list)
    set: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One run of each cell."""

    name: str
    pieces: list[str]
    set: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Search:
    """One setting, chosen for each value of an axis by the validation loss of short runs."""

    set: list[str]
    values: list[Any]
    stage: str
    axis: str
    seeds: list[Choice]
    pieces: list[str] = field(default_factory=list)
    change: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Test:
    """What `kvpath test` is given."""

    pieces: list[str] = field(default_factory=list)
    set: Settings = field(default_factory=dict)
    after: Literal["last", "each"] = "last"


@dataclass(frozen=True)
class Study:
    """A whole series."""

    file: Path
    run: Path
    """Directory below which everything lies."""

    pieces: list[str]
    """What all runs share."""

    set: Settings
    axes: dict[str, list[Choice]]
    stages: list[Stage]
    only: list[dict[str, Any]] | None = None
    leave_out: list[dict[str, Any]] = field(default_factory=list)
    search: Search | None = None
    test: Test | None = None

    @classmethod
    def read(cls, path: Path) -> "Study":
        """Read and check a file.

        Raises:
            UserError: every problem found, each naming the field and the value.
        """
        from kvpath.series.mistakes import problems

        try:
            values = pieces.read(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"series {path}: {' '.join(str(error).split())}") from error
        UserError.raise_all(f"series {path}: {problem}" for problem in problems(values))
        axes = {name: choices(name, axis) for name, axis in (values.get("axes") or {}).items()}
        study = cls(
            file=path,
            run=Path(values["run"]),
            pieces=values.get("pieces") or [],
            set=values.get("set") or {},
            axes=axes,
            stages=[Stage(**stage) for stage in values["stages"]],
            only=values.get("only"),
            leave_out=values.get("except") or [],
            search=_search(values.get("search"), values),
            test=None if values.get("test") is None else Test(**values["test"]),
        )
        UserError.raise_all(f"series {path}: {problem}" for problem in study._clashes())
        return study

    def combinations(self) -> list[tuple[Choice, ...]]:
        """The choices of each cell, the last axis changing fastest."""
        return [
            cell
            for cell in itertools.product(*self.axes.values())
            if (self.only is None or any(map(cell_fits(cell), self.only)))
            and not any(map(cell_fits(cell), self.leave_out))
        ]

    def _clashes(self) -> Iterator[str]:
        cells = self.combinations()
        if not cells:
            yield "only and except leave no combination"
        names = [cell_name(cell) for cell in cells]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"axes: two combinations would have the directory {name!r}; name a value otherwise"
        if self.search and "search" in names:
            yield "axes: a cell may not be called search, where searches are"


def cell_name(cell: tuple[Choice, ...]) -> str:
    """What a cell's directory is called; empty if there are no axes."""
    return "-".join(choice.name for choice in cell)


def cell_fits(cell: tuple[Choice, ...]) -> Any:
    """Whether a pattern, such as {layout: [gqa, mla], seed: 3}, is about a cell: a function of the pattern."""
    chosen = {choice.axis: choice.value for choice in cell}

    def fits(pattern: Mapping[str, Any]) -> bool:
        return all(
            chosen[axis] in {str(value) for value in (wanted if isinstance(wanted, list) else [wanted])}
            for axis, wanted in pattern.items()
        )

    return fits


def choices(axis: str, stated: dict[str, Any]) -> list[Choice]:
    """The values of an axis: named ones, or a list of plain ones that go to some keys."""
    if not is_plain(stated):
        return [
            Choice(axis, str(value), str(value), (of or {}).get("pieces") or [], (of or {}).get("set") or {})
            for value, of in stated.items()
        ]
    keys = as_list(stated["set"])
    return [Choice(axis, str(value), f"{axis}{value}", [], dict.fromkeys(keys, value)) for value in stated["values"]]


def is_plain(axis: Mapping[Any, Any]) -> bool:
    """Whether an axis is one of plain values."""
    return isinstance(axis.get("values"), list)


def as_list(value: Any) -> list[Any]:
    """One value or several."""
    return value if isinstance(value, list) else [value]


def _search(stated: dict[str, Any] | None, values: dict[str, Any]) -> Search | None:
    if stated is None:
        return None
    return Search(
        set=as_list(stated["set"]),
        values=stated["values"],
        stage=stated.get("stage") or values["stages"][0]["name"],
        axis=stated.get("axis") or next(iter(values["axes"])),
        seeds=choices("seed", stated["seeds"]) if stated.get("seeds") else [],
        pieces=stated.get("pieces") or [],
        change=stated.get("change") or {},
    )
