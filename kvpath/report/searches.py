"""Searches for a setting that stand below a report's folders: their runs choose, and are in no table of results."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpath.errors import UserError
from kvpath.report.results import read_json
from kvpath.report.runs import Run
from kvpath.report.tables import Cell, Table, text

FOLDER = "search"
"""Where `kvpath series` has the runs of a search, and what it decided."""


@dataclass(frozen=True)
class Search:
    """What was decided on for one arm.

    Args:
        arm: the value of the series' axis.
        settings: what was tried, by their names in a configuration.
        tried: each value, and its mean validation loss; None if a run diverged.
        chosen: the value of the lowest.
        at_the_edge: whether a wider search might find a better one.
    """

    arm: str
    settings: tuple[str, ...]
    tried: tuple[tuple[Any, float | None], ...]
    chosen: Any
    at_the_edge: bool


def is_of_search(run: Run, folders: Sequence[Path]) -> bool:
    """Whether a run is a candidate of a search that lies below one of the folders, and was not asked for by itself."""
    within = [run.path.relative_to(folder) for folder in folders if run.path.is_relative_to(folder)]
    return bool(within) and all(FOLDER in path.parts[:-1] for path in within)


def read_searches(folders: Sequence[Path]) -> list[Search]:
    """All decisions below the folders.

    Raises:
        UserError: a file of one cannot be read.
    """
    found = {path.resolve(): path for folder in folders for path in sorted(folder.rglob(f"{FOLDER}/*.json"))}
    return [_search(path) for path in found.values()]


def search_table(searches: Sequence[Search]) -> Table | None:
    """A row for each arm; None where nothing was searched for."""
    if not searches:
        return None
    columns = ("Arm", "Setting", "Tried (validation loss)", "Chosen", "At the edge")
    note = "Runs of a search are in no other table. At the edge: a wider search might have found a better value."
    return Table("searches", "Searches", columns, tuple(_row(search) for search in searches), (note,))


def _row(search: Search) -> tuple[Cell, ...]:
    tried = ", ".join(f"{value} ({'diverged' if loss is None else f'{loss:.4f}'})" for value, loss in search.tried)
    settings = ", ".join(name.rsplit(".", 1)[-1] for name in search.settings)
    return (
        text(search.arm),
        text(settings),
        text(tried),
        text(search.chosen),
        text("yes" if search.at_the_edge else "no"),
    )


def _search(path: Path) -> Search:
    stored = read_json(path, dict)
    try:
        return Search(
            path.stem,
            tuple(stored["asked"]["set"]),
            tuple((one["value"], one["mean"]) for one in stored["candidates"]),
            stored["chosen"],
            bool(stored["at_the_edge"]),
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} holds no decision of a search: {error} is missing") from error
