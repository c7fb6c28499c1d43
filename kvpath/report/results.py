"""What evaluations have written into `perplexity.json` and `retrieval.json`."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvpath.errors import UserError

PERPLEXITY, RETRIEVAL = "perplexity.json", "retrieval.json"


@dataclass(frozen=True)
class Bucket:
    """Tokens at positions [start, stop) of their windows."""

    start: int
    stop: int
    perplexity: float


@dataclass(frozen=True)
class Result:
    """One evaluation of one corpus at one context."""

    step: int
    corpus: str
    split: str
    context: int
    stride: int
    """Equal to the context where windows do not overlap."""

    dtype: str
    perplexity: float
    bits_per_byte: float | None
    fingerprint: str | None
    """Of the tokens and where documents end; None from a version that did not write it."""

    by_position: tuple[Bucket, ...]


@dataclass(frozen=True)
class Retrieval:
    """One evaluation of recall."""

    step: int
    task: str
    context: int
    depth: float | None
    n_keys: int | None
    dtype: str
    accuracy: float
    fingerprint: str | None


_Entry = TypeVar("_Entry", Result, Retrieval)


def read_results(run: Path) -> list[Result]:
    """The perplexities of a run; none if it was not evaluated.

    Raises:
        UserError: the file is damaged or of another form.
    """
    return list(_read(run / PERPLEXITY, _result))


def read_retrieval(run: Path) -> list[Retrieval]:
    """The recall of a run; none if it was not evaluated.

    Raises:
        UserError: the file is damaged or of another form.
    """
    return list(_read(run / RETRIEVAL, _retrieval))


def read_json(path: Path, kind: type) -> Any:
    """What a JSON file holds.

    Raises:
        UserError: it cannot be read, or holds something else than `kind`.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, kind):
        raise UserError(f"{path} must hold a {kind.__name__}, got a {type(found).__name__}")
    return found


def _read(path: Path, entry: Callable[[dict[str, Any]], _Entry]) -> Iterator[_Entry]:
    for index, values in enumerate(read_json(path, list) if path.exists() else []):
        try:
            yield entry(values)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{path}: entry {index} is no result: {reason}") from error


def _result(values: dict[str, Any]) -> Result:
    context = int(values["context"])
    bits = values.get("bits_per_byte")
    return Result(
        step=int(values["step"]),
        corpus=str(values["corpus"]),
        split=str(values.get("split") or "test"),
        context=context,
        stride=int(values.get("stride") or context),
        dtype=str(values["dtype"]),
        perplexity=_perplexity(values["nll_sum"], values["tokens"]),
        bits_per_byte=None if bits is None else _finite(bits),
        fingerprint=_text_or_none(values.get("fingerprint")),
        by_position=tuple(
            Bucket(int(part["from"]), int(part["to"]), _perplexity(part["nll_sum"], part["tokens"]))
            for part in values.get("by_position") or ()
            if part["tokens"]
        ),
    )


def _retrieval(values: dict[str, Any]) -> Retrieval:
    depth, keys = values.get("depth"), values.get("n_keys")
    return Retrieval(
        step=int(values["step"]),
        task=str(values["task"]),
        context=int(values["context"]),
        depth=None if depth is None else _finite(depth),
        n_keys=None if keys is None else int(keys),
        dtype=str(values["dtype"]),
        accuracy=_finite(values["correct"]) / int(values["asked"]),
        fingerprint=_text_or_none(values.get("fingerprint")),
    )


def _perplexity(nll: Any, tokens: Any) -> float:
    return math.exp(min(_finite(nll) / int(tokens), 700.0))


def _finite(value: Any) -> float:
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"{value!r} is not finite")
    return found


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(value)
