"""Runs as a report needs them, found below folders and read from their files alone."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvpath.errors import UserError
from kvpath.report.costs import Costs, Counter
from kvpath.report.curves import Curves, read_curves
from kvpath.report.results import PERPLEXITY, RETRIEVAL, Result, Retrieval, read_json, read_results, read_retrieval

_NOT_ENTERED = {"checkpoints", "tb", "bad_batches"}
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Run:
    """One run directory."""

    path: Path
    name: str
    config: dict[str, Any]
    """Its config.yaml."""

    costs: Costs
    step: int
    planned_steps: int | None
    """None if no summary.json says that it ever ended."""

    tokens_per_step: float
    stream_hash: str | None
    curves: Curves
    results: tuple[Result, ...]
    retrieval: tuple[Retrieval, ...]

    @property
    def finished(self) -> bool:
        """Whether the run reached the last step of its budget."""
        return self.planned_steps is not None and self.step >= self.planned_steps

    @property
    def seq_len(self) -> int:
        """Tokens of a training sequence, which name the stage."""
        return int(self.config["data"]["seq_len"])

    @property
    def tokens(self) -> float:
        """Tokens trained on in this run."""
        return self.step * self.tokens_per_step

    @property
    def tokens_in_all(self) -> float:
        """With those of the stages before, as far as the config says what they have passed over."""
        return self.tokens + (self.config["data"].get("start_tokens") or 0)

    @property
    def validation_perplexity(self) -> float | None:
        """Of the last validation; None if there was none."""
        points = self.curves.validation
        return math.exp(min(points[-1][1], 700.0)) if points else None

    @property
    def seed(self) -> tuple[Any, Any]:
        """Of the weights and of the data's order."""
        return self.config["model"].get("seed", 0), self.config["data"].get("seed", 0)

    @property
    def seed_text(self) -> str:
        """The seed, both numbers where they differ."""
        weights, data = self.seed
        return str(weights) if weights == data else f"{weights}/{data}"

    @property
    def attention(self) -> tuple[str, dict[str, Any]]:
        """The strategy's class, without its module, and its fields."""
        stated = self.config["model"]["backbone"]["attention"]
        return str(stated["class_path"]).rsplit(".", 1)[-1], stated.get("init_args") or {}


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """All runs below the folders, and a line for each that had to be left out.

    Raises:
        UserError: a folder is not there, or holds no run that can be read.
    """
    UserError.raise_all(f"{folder}: there is no such folder" for folder in folders if not folder.is_dir())
    counter, runs, left_out = Counter(), [], []
    for path in _run_directories(folders):
        try:
            runs.append(read_run(path, counter))
        except UserError as error:
            left_out.append(f"{path} is left out: {error}")
    if not runs:
        where = ", ".join(map(str, folders))
        raise UserError("; ".join([f"no run (a folder with a config.yaml and a metrics.jsonl) in {where}", *left_out]))
    return runs, left_out


def read_run(path: Path, counter: Counter) -> Run:
    """One run.

    Raises:
        UserError: naming the file and what is wrong with it.
    """
    config = _config(path / "config.yaml")
    data = config["data"]
    per_step = data["budget"].get("global_batch_tokens") or data["budget"]["global_batch_sequences"] * data["seq_len"]
    summary_file = path / "summary.json"
    summary = read_json(summary_file, dict) if summary_file.exists() else {}
    curves = read_curves(path / "metrics.jsonl", per_step)
    planned, step = summary.get("planned_steps"), summary.get("step", curves.last_step)
    if not isinstance(step, int) or not isinstance(planned, int | None):
        raise UserError(f"{summary_file}: step and planned_steps must be whole numbers, got {step!r} and {planned!r}")
    return Run(
        path=path,
        name=str(config.get("name") or summary.get("name") or path.name),
        config=config,
        costs=counter.costs(config["model"]["backbone"], data["seq_len"]),
        step=step,
        planned_steps=planned,
        tokens_per_step=per_step,
        stream_hash=summary.get("stream_hash") or curves.stream_hash,
        curves=curves,
        results=tuple(read_results(path)),
        retrieval=tuple(read_retrieval(path)),
    )


def _run_directories(folders: Sequence[Path]) -> Iterator[Path]:
    """Each once, in the order of names, however the folders overlap."""
    seen = set()
    for folder in folders:
        for place, below, files in os.walk(folder):
            below[:] = sorted(name for name in below if name not in _NOT_ENTERED)
            path = Path(place)
            holds = "config.yaml" in files and {"metrics.jsonl", "summary.json", PERPLEXITY, RETRIEVAL} & set(files)
            if holds and path.resolve() not in seen:
                seen.add(path.resolve())
                yield path


def _config(path: Path) -> dict[str, Any]:
    """A run's configuration, with all that is looked up in it.

    Raises:
        UserError: it is none.
    """
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), _LOADER)  # the safe one, in C where there is
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    UserError.raise_all(f"{path}: {problem}" for problem in _missing(config))
    return dict(config)


def _missing(config: Any) -> Iterator[str]:
    wanted: list[tuple[str, type | tuple[type, ...]]] = [
        ("model.backbone.attention.class_path", str),
        ("data.seq_len", int),
        ("data.budget", dict),
    ]
    for key, kind in wanted:
        found = config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if not isinstance(found, kind):
            yield f"this is no run's configuration: {key} is {found!r}"
            return
    budget = config["data"]["budget"]
    batch = budget.get("global_batch_tokens") or budget.get("global_batch_sequences")
    if not isinstance(batch, int) or config["data"]["seq_len"] < 1:
        yield f"data.budget must state a global batch, got {budget!r}"
