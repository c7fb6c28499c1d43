"""Runs that differ by their seeds alone, as one arm at one stage, and what arms are called."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from kvpath.errors import UserError
from kvpath.report.runs import Run

LAYOUTS = {
    "KVPathConcat": "KVPath-Concat",
    "KVPathResidual": "KVPath-Residual",
    "KVPathRolling": "KVPath-Rolling",
    "KVPathMLA": "KVPath-MLA",
}
"""What classes are called that the paper calls otherwise."""

_ORDER = ("MHA", "GQA", "MQA", "CLA", "KVPath-Concat", "KVPath-Residual", "KVPath-Rolling", "MLA", "KVPath-MLA")

_KEPT = ("model.", "data.source.", "data.packing", "data.document_masking", "data.budget.", "trainer.precision")
_NOT_KEPT = (
    "model.seed",
    "model.compile",
    "model.activation_checkpointing",
    "model.backbone.max_seq_len",
    "model.backbone.parameters",
    "model.backbone.d_ff_multiple",
    "data.budget.micro_batch",
)
_FOLLOWS = ("d_ff",)
"""Fields that change because others do, and name an arm only where nothing else does."""

_SHOWN = 4


@dataclass(frozen=True)
class Arm:
    """One setting at one stage, over seeds."""

    name: str
    """The layout, and what sets the arm apart from others of that layout at this stage."""

    layout: str
    values: dict[str, str]
    """What decides the result, seeds apart, by its key in the configuration."""

    runs: tuple[Run, ...]
    """By seed."""

    @property
    def first(self) -> Run:
        """Whose model and budget are those of all."""
        return self.runs[0]

    @property
    def seq_len(self) -> int:
        """Tokens of a training sequence, which name the stage."""
        return self.first.seq_len

    @property
    def seeds(self) -> str:
        """All of them."""
        return ", ".join(run.seed_text for run in self.runs)


def arms_of(runs: Sequence[Run]) -> tuple[list[Arm], list[str]]:
    """Arms by stage and layout, and a line for each run that another one doubles."""
    settings = _settings(runs)
    groups: dict[tuple[int, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.seq_len, json.dumps([layout_name(run), settings[run.path]])].append(run)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], _place(item[1][0])))
    names = _names([(seq_len, members[0]) for (seq_len, _), members in ordered], settings)
    arms, doubled = [], []
    for (_, members), name in zip(ordered, names, strict=True):
        kept: dict[Any, Run] = {}
        for run in sorted(members, key=lambda run: not run.finished):
            first = kept.setdefault(json.dumps(run.seed), run)
            if first is not run:
                doubled.append(f"{run.path} is left out: {first.path} is of the same arm, stage and seed")
        by_seed = tuple(sorted(kept.values(), key=lambda run: (str(run.seed[0]).zfill(12), str(run.seed[1]).zfill(12))))
        arms.append(Arm(name, layout_name(by_seed[0]), settings[by_seed[0].path], by_seed))
    return arms, doubled


def layout_name(run: Run) -> str:
    """What a layout is called in tables; with two query heads, one for both is GQA: the paper's at a small scale."""
    kind, values = run.attention
    heads, kv_heads = values.get("n_heads"), values.get("n_kv_heads")
    if kind == "GQA" and isinstance(heads, int) and heads > 1:
        if kv_heads == heads:
            return "MHA"
        if kv_heads == 1 and heads > 2:
            return "MQA"
    return LAYOUTS.get(kind, kind)


def _place(run: Run) -> tuple[int, str]:
    """The paper's layouts in its order, then others by name."""
    name = layout_name(run)
    return _ORDER.index(name) if name in _ORDER else len(_ORDER), name


def deciding(run: Run) -> dict[str, str]:
    """The values that decide a run's result, its seeds and its stage apart; of paths, the last part alone."""
    kept = {}
    for key, value in _flat(run.config):
        if not key.startswith(_KEPT) or key.startswith(_NOT_KEPT):
            continue
        in_source = key.startswith("data.source.") and isinstance(value, str)
        kept[key] = PurePath(value).name if in_source else _short(value)
    return kept


def reference_of(arm: Arm, arms: Sequence[Arm], wanted: str) -> Arm | None:
    """The arm of the same stage that `wanted` names, a layout or a whole name; of several, the one most like `arm`.

    None if there is none, if `arm` is one itself, or if several are as like it.
    """
    here = [other for other in arms if other.seq_len == arm.seq_len]
    named = [other for other in here if same_name(other.name, wanted)]
    named = named or [other for other in here if same_name(other.layout, wanted)]
    if any(other is arm for other in named) or not named:
        return None
    apart = [sum(arm.values.get(key) != value for key, value in other.values.items()) for other in named]
    nearest = [other for other, distance in zip(named, apart, strict=True) if distance == min(apart)]
    return nearest[0] if len(nearest) == 1 else None


def references(arms: Sequence[Arm], wanted: Sequence[str]) -> list[str]:
    """What to compare with, as arms are called: those `wanted`; if none are, GQA, if there is one.

    Raises:
        UserError: no arm is called so.
    """
    names = list(dict.fromkeys(name for arm in arms for name in (arm.layout, arm.name)))
    called = {want: [name for name in names if same_name(name, want)] for want in wanted or ["GQA"]}
    UserError.raise_all(
        f"--reference {want}: no arm is called so; there are {'; '.join(names)}" for want in wanted if not called[want]
    )
    return list(dict.fromkeys(found[0] for found in called.values() if found))


def same_name(name: str, other: str) -> bool:
    """Whether two names are one, written with other signs between the letters or in other cases."""
    return _letters(name) == _letters(other)


def stage_name(seq_len: int) -> str:
    """2,048 tokens as 2K."""
    return f"{seq_len // 1024}K" if seq_len % 1024 == 0 else f"{seq_len:,}"


def differing(values: dict[str, str], others: dict[str, str]) -> Iterator[str]:
    """Keys in which two settings differ, those of the model apart."""
    for key, value in values.items():
        if not key.startswith("model.backbone.") and value != others.get(key, value):
            yield key


def _settings(runs: Sequence[Run]) -> dict[Path, dict[str, str]]:
    """What decides each run, without what not all of its layout and stage have written down.

    An older version had not all of today's keys, and did what is their default now.
    """
    stated = {run.path: deciding(run) for run in runs}
    shared: dict[tuple[int, str], set[str]] = {}
    for run in runs:
        keys = shared.setdefault((run.seq_len, layout_name(run)), set(stated[run.path]))
        keys.intersection_update(stated[run.path])
    return {
        run.path: {
            key: value for key, value in stated[run.path].items() if key in shared[run.seq_len, layout_name(run)]
        }
        for run in runs
    }


def _names(heads: Sequence[tuple[int, Run]], stated: Mapping[Path, dict[str, str]]) -> list[str]:
    """A name for each group: the layout, and the values that most of its layout at its stage have not."""
    names: list[str] = []
    settings = [stated[run.path] for _, run in heads]
    alike = [(seq_len, layout_name(run)) for seq_len, run in heads]
    for values, kind in zip(settings, alike, strict=True):
        peers = [other for other, other_kind in zip(settings, alike, strict=True) if other_kind == kind]
        apart = [key for key in dict.fromkeys(key for peer in peers for key in peer) if _sets_apart(key, values, peers)]
        telling = [key for key in apart if key.rsplit(".", 1)[-1] not in _FOLLOWS] or apart
        said = [f"{key.rsplit('.', 1)[-1]} {values[key]}" for key in telling]
        more = [f"and {len(said) - _SHOWN} more"] * (len(said) > _SHOWN)
        names.append(", ".join([kind[1], *said[:_SHOWN], *more]))
    # Two that still have one name at one stage, as when only what is not shown differs.
    seen: Counter[tuple[int, str]] = Counter()
    for index, (seq_len, _) in enumerate(heads):
        seen[seq_len, names[index]] += 1
        if (times := seen[seq_len, names[index]]) > 1:
            names[index] += f" ({times})"
    return names


def _sets_apart(key: str, values: dict[str, str], peers: Sequence[dict[str, str]]) -> bool:
    counts = Counter(peer.get(key) for peer in peers).most_common()
    usual = len(counts) == 1 or counts[0][1] > counts[1][1]
    return len(counts) > 1 and not (usual and values.get(key) == counts[0][0])


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _short(value: Any) -> str:
    """A value as text; a class without its module."""
    if isinstance(value, str):
        return value.rsplit(".", 1)[-1] if value.startswith("kvpath.") else value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, default=str)


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == ".")
