"""What is wrong with the file of a series: every problem, naming the field and the value."""

import re
from collections.abc import Iterator
from typing import Any

from kvpath.series.study import as_list, is_plain

KEYS = ("run", "pieces", "set", "axes", "only", "except", "stages", "search", "test")
_STAGE = ("name", "pieces", "set")
_SEARCH = ("set", "values", "stage", "axis", "seeds", "pieces", "change")
_TEST = ("pieces", "set", "after")
_DIRECTORY = re.compile(r"[\w.+=,@][\w.+=,@-]*")


def problems(values: Any) -> Iterator[str]:
    """All that is wrong with what a file holds."""
    if not isinstance(values, dict):
        yield f"must hold run, pieces and stages, got {type(values).__name__}"
        return
    yield from _unknown(values, KEYS, "")
    if not isinstance(values.get("run"), str):
        yield f"run must be a directory, got {values.get('run')!r}"
    yield from _not_pieces(values, "")
    yield from _not_settings(values, "set", "")
    axes = values.get("axes") or {}
    yield from _wrong_axes(axes)
    if isinstance(axes, dict):
        for key in ("only", "except"):
            yield from _wrong_patterns(values.get(key), key, axes)
    stages = values.get("stages")
    yield from _wrong_stages(stages)
    names = [str(stage.get("name")) for stage in as_list(stages) if isinstance(stage, dict)]
    yield from _wrong_search(values.get("search"), axes, names)
    yield from _wrong_test(values.get("test"))


def _wrong_axes(axes: Any) -> Iterator[str]:
    if not isinstance(axes, dict):
        yield f"axes must hold values by the name of an axis, got {axes!r}"
        return
    for name, axis in axes.items():
        field = f"axes.{name}"
        if not isinstance(name, str) or not _DIRECTORY.fullmatch(name):
            yield f"{field} must be a name of letters, digits and .+=,@-_"
        if not isinstance(axis, dict) or not axis:
            yield f"{field} must hold named values, or set and values, got {axis!r}"
        elif is_plain(axis):
            yield from _wrong_values(axis, field)
        else:
            yield from _wrong_choices(axis, field)


def _wrong_choices(axis: dict[Any, Any], field: str) -> Iterator[str]:
    for value, choice in axis.items():
        if not _DIRECTORY.fullmatch(str(value)):
            yield f"{field}: {value!r} must be a name of letters, digits and .+=,@-_: a directory is called so"
        if choice is not None and not isinstance(choice, dict):
            yield f"{field}.{value} must hold pieces or set, got {choice!r}"
            continue
        yield from _unknown(choice or {}, ("pieces", "set"), f"{field}.{value}.")
        yield from _not_pieces(choice or {}, f"{field}.{value}.")
        yield from _not_settings(choice or {}, "set", f"{field}.{value}.")


def _wrong_values(axis: dict[str, Any], field: str, known: tuple[str, ...] = ("set", "values")) -> Iterator[str]:
    yield from _unknown(axis, known, f"{field}.")
    if not axis.get("set") or not all(isinstance(key, str) for key in as_list(axis["set"])):
        yield f"{field}.set must be a dotted key or a list of them, got {axis.get('set')!r}"
    values = axis.get("values")
    if not isinstance(values, list) or not values:
        yield f"{field}.values must be a list of values, got {values!r}"
        return
    for value in values:
        if isinstance(value, dict | list) or value is None or not _DIRECTORY.fullmatch(str(value)):
            yield f"{field}.values must be numbers or words of letters, digits and .+=,@-_, got {value!r}"
    if len(set(map(str, values))) < len(values):
        yield f"{field}.values must be different, got {values}"


def _wrong_patterns(patterns: Any, key: str, axes: dict[str, Any]) -> Iterator[str]:
    if patterns is None:
        return
    if not isinstance(patterns, list) or not all(isinstance(pattern, dict) and pattern for pattern in patterns):
        yield f"{key} must be a list of combinations such as {{layout: gqa, seed: [1, 2]}}, got {patterns!r}"
        return
    for index, pattern in enumerate(patterns):
        for axis, wanted in pattern.items():
            if axis not in axes:
                yield f"{key}[{index}]: {axis} is not an axis; there are {', '.join(axes) or 'none'}"
            elif isinstance(axes[axis], dict):
                known = axes[axis]["values"] if is_plain(axes[axis]) else axes[axis]
                missing = [value for value in as_list(wanted) if str(value) not in map(str, known)]
                if missing:
                    yield (
                        f"{key}[{index}].{axis}: {', '.join(map(str, missing))} is not a value of it;"
                        f" there are {', '.join(map(str, known))}"
                    )


def _wrong_stages(stages: Any) -> Iterator[str]:
    if not isinstance(stages, list) or not stages:
        yield f"stages must be a list of at least one stage, got {stages!r}"
        return
    for index, stage in enumerate(stages):
        field = f"stages[{index}]"
        if not isinstance(stage, dict) or not isinstance(stage.get("name"), str) or "pieces" not in stage:
            yield f"{field} must have a name and pieces, got {stage!r}"
            continue
        if not _DIRECTORY.fullmatch(name := stage["name"]):
            yield f"{field}.name must be of letters, digits and .+=,@-_: a directory is called so, got {name!r}"
        yield from _unknown(stage, _STAGE, f"{field}.")
        yield from _not_pieces(stage, f"{field}.")
        yield from _not_settings(stage, "set", f"{field}.")
    names = [str(stage.get("name")) for stage in stages if isinstance(stage, dict)]
    if len(set(names)) < len(names):
        yield f"stages must have different names, got {', '.join(names)}"


def _wrong_search(search: Any, axes: Any, stages: list[str]) -> Iterator[str]:
    if search is None:
        return
    if not isinstance(search, dict):
        yield f"search must hold set, values, stage and axis, got {search!r}"
        return
    yield from _wrong_values(search, "search", _SEARCH)
    yield from _not_pieces(search, "search.")
    yield from _not_settings(search, "change", "search.")
    if search.get("stage") not in (None, *stages):
        yield f"search.stage must be one of {', '.join(stages)}, got {search['stage']!r}"
    if not isinstance(axes, dict) or not axes:
        yield "search needs axes: a value is chosen for each value of one"
    elif search.get("axis") not in (None, *axes):
        yield f"search.axis must be one of {', '.join(axes)}, got {search['axis']!r}"
    if (seeds := search.get("seeds")) is not None:
        if not isinstance(seeds, dict):
            yield f"search.seeds must hold set and values, got {seeds!r}"
            return
        yield from _wrong_values(seeds, "search.seeds")
        yield from _seeds_of_the_study(seeds, axes)


def _seeds_of_the_study(seeds: dict[str, Any], axes: Any) -> Iterator[str]:
    """What decides on a setting must not be what is reported with it."""
    for name, axis in axes.items() if isinstance(axes, dict) else ():
        if isinstance(axis, dict) and is_plain(axis) and set(as_list(axis.get("set"))) & set(as_list(seeds.get("set"))):
            both = [str(value) for value in as_list(seeds.get("values")) if value in axis["values"]]
            if both:
                yield f"search.seeds must be others than those of axes.{name}, got {', '.join(both)} in both"


def _wrong_test(test: Any) -> Iterator[str]:
    if test is None:
        return
    if not isinstance(test, dict):
        yield f"test must hold pieces or set, got {test!r}"
        return
    yield from _unknown(test, _TEST, "test.")
    yield from _not_pieces(test, "test.")
    yield from _not_settings(test, "set", "test.")
    if test.get("after", "last") not in ("last", "each"):
        yield f"test.after must be last or each (of the stages), got {test['after']!r}"


def _unknown(values: dict[str, Any], known: tuple[str, ...], prefix: str) -> Iterator[str]:
    for key in values:
        if key not in known:
            yield f"{prefix}{key} is not a key; there are {', '.join(known)}"


def _not_pieces(values: dict[str, Any], prefix: str) -> Iterator[str]:
    value = values.get("pieces", [])
    if value is not None and (not isinstance(value, list) or not all(isinstance(piece, str) for piece in value)):
        yield f"{prefix}pieces must be a list of pieces, got {value!r}"


def _not_settings(values: dict[str, Any], key: str, prefix: str) -> Iterator[str]:
    value = values.get(key)
    if value is not None and (not isinstance(value, dict) or not all(isinstance(name, str) for name in value)):
        yield f"{prefix}{key} must hold values by dotted key, got {value!r}"
