"""What a resume may change, and the configuration that a lone checkpoint stores."""

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvpath.errors import UserError
from kvpath.training.run_directory import RunDirectory
from kvpath.training.say import rank_zero_say

if TYPE_CHECKING:
    from kvpath.data.evaluations import EvaluatedText

GUARDED = {
    "model": ("model.backbone.", "model.seed"),
    "data": (
        "data.source",
        "data.tokenizer",
        "data.seq_len",
        "data.holdout_every",
        "data.max_tokens",
        "data.seed",
        "data.shuffle_block",
        "data.start_tokens",
        "data.stream",
        "data.lanes",
        "data.packing",
        "data.document_masking",
        "data.budget.global_batch",
    ),
    "horizon": ("data.budget.tokens", "model.optimizer."),
}
"""What changes the model, the order of the data, or the learning rate of the steps to come."""

_HOW_TO_READ = ("tries", "verify")
"""What of a source changes none of its documents."""


def changes(before: str, after: str, defaults: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The dotted keys whose values differ between two configurations in YAML.

    A key that the first does not know, since it is older, had its default.
    """
    old, new = yaml.safe_load(before), yaml.safe_load(after)
    known, usual, wanted = _flat(old), _flat(defaults), _flat(new)
    unknown = {key: usual[key] for key in wanted if key not in known and key in usual}
    return differences({**known, **unknown}, wanted)


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The dotted keys whose values differ."""
    old, new = _flat(before), _flat(after)
    return {
        key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    }


def refuse_changes(changed: dict[str, tuple[Any, Any]], allowed: list[str]) -> None:
    """List what changed, and refuse what was not allowed by name.

    Raises:
        UserError: naming each key with both values, and the word that allows it.
    """
    for key, (old, new) in changed.items():
        rank_zero_say(f"changed since the run began: {key}: {old} -> {new}")
    UserError.raise_all(
        f"--allow must name some of {', '.join(GUARDED)}, got {word}" for word in allowed if word not in GUARDED
    )
    UserError.raise_all(
        f"{key} was {old} and is now {new}: that changes the {kind} of a run; --allow '[{kind}]' allows it"
        for key, (old, new) in changed.items()
        for kind, prefixes in GUARDED.items()
        if key.startswith(prefixes) and key.rpartition(".")[2] not in _HOW_TO_READ and kind not in allowed
    )


def say_conflicts(stored: dict[str, Any], given: dict[str, Any]) -> None:
    """Name what the command line made different from the stored model: it is what is used."""
    for key, (old, new) in differences(stored, given).items():
        rank_zero_say(f"model.backbone.{key} is {old} in the checkpoint; {new}, as given, is used")


def trained_on(checkpoint: Path) -> dict[str, Any]:
    """The data section of the configuration that weights were trained with; empty if it is not known."""
    from kvpath.training.run_directory import run_of
    from kvpath.training.stored_config import read_checkpoint

    run = run_of(checkpoint)
    if run is not None and run.config.is_file():
        return (yaml.safe_load(run.config.read_text(encoding="utf-8")) or {}).get("data") or {}
    return read_checkpoint(checkpoint)["kvpath"].get("data") or {}


def refuse_other_holdout(trained: dict[str, Any], now: dict[str, Any], region: str) -> None:
    """Refuse to evaluate on held-out documents that may not have been held out when the weights were trained.

    Args:
        trained: the data section of the configuration that they were trained with.
        now: that of the evaluation.
        region: validation or test.

    Raises:
        UserError: some source is in both, with another `holdout_every`.
    """
    before, after = trained.get("holdout_every"), now.get("holdout_every")
    if before == after or after is None or now.get(region):
        return
    if shared := _leaves(trained.get("source")) & _leaves(now.get("source")):
        raise UserError(
            f"data.holdout_every was {before} when the weights were trained and is {after}: that would score documents"
            f" of {min(shared)} that they were trained on; state {before}, or data.{region} (a source)"
        )


def refuse_trained_texts(
    trained: dict[str, Any], evaluate: dict[str, dict[str, Any]], texts: "Mapping[str, EvaluatedText]"
) -> None:
    """Refuse to evaluate on documents of `data.evaluate` that the weights were trained on.

    Args:
        trained: the data section of the configuration that they were trained with.
        evaluate: that section's `evaluate` of the evaluation.
        texts: the same, made.

    Raises:
        UserError: a source is in both, and is not held out in the same way.
    """
    from kvpath.data.retrieval import Task  # whose regions share nothing

    evaluate = {name: text for name, text in evaluate.items() if not isinstance(texts[name].source, Task)}
    leaves = {leaf: json.loads(leaf).get("directory") for leaf in _leaves(trained.get("source"))}
    before = trained.get("holdout_every")
    held_out = [
        (name, before, leaf)
        for name, text in evaluate.items()
        for leaf in _leaves(text.get("source"))
        if leaf in leaves and leaves[leaf] is None
    ]
    for directory in filter(None, leaves.values()):
        held_out += _prepared_from(texts, Path(directory))
    UserError.raise_all(
        f"data.evaluate.{name}: holdout_every was {before} when the weights were trained and is {now}: that would score"
        f" documents of {what} that they were trained on; state {before or 'another source'}"
        for name, before, what in held_out
        if (now := texts[name].holdout_every) != before or before is None
    )


def _prepared_from(texts: "Mapping[str, EvaluatedText]", directory: Path) -> Iterator[tuple[str, int | None, str]]:
    """The texts that prepared shards were made of, if these are still there, and how they hold documents out."""
    from kvpath.data.shards import ShardFolder

    # what cannot be read is refused where it is needed
    with suppress(UserError):
        plan = ShardFolder(directory).plan
        for name, text in texts.items():
            if text.source.fingerprint() == plan.source:
                yield name, plan.holdout_every, str(directory)


_OF_A_PASS = ("max_documents", "bad_documents", *_HOW_TO_READ)
"""What of a source does not change which documents it is about."""


def _leaves(source: Any) -> set[str]:
    """The sources that a source is made of."""
    arguments = (source or {}).get("init_args") or {}
    inner = [*arguments.get("sources", []), *([arguments["source"]] if "source" in arguments else [])]
    if inner:
        return {leaf for one in inner for leaf in _leaves(one)}
    kept = {key: value for key, value in arguments.items() if key not in _OF_A_PASS and value is not None}
    return {json.dumps(kept, sort_keys=True)} if source else set()


def stored_config(checkpoint: Path) -> Path:
    """The configuration that a checkpoint or an export stores, as a YAML file.

    That of a checkpoint is the model's alone; an export's has the data too, read by the tokenizer that lies beside it.

    Raises:
        UserError: if it stores none.
    """
    from kvpath.interop.exported import TOKENIZER
    from kvpath.training.stored_config import read_checkpoint

    stored = read_checkpoint(checkpoint)["kvpath"]
    data = stored.get("data") or {}
    if stored.get("end_of_text") is not None:
        data["tokenizer"] = {"name": str(checkpoint.with_name(TOKENIZER)), "end_of_text": stored["end_of_text"]}
    return _written({"model": {"backbone": stored["backbone"]}, **({"data": data} if data else {})})


OF_TRAINING = ("callbacks", "logger", "plugins", "profiler")
"""What of a run's `trainer` is none of an evaluation's: it would write over the run's curves, and run others' code."""


def config_for_evaluation(run: RunDirectory) -> Path:
    """The configuration of a run as a YAML file, to evaluate its weights: with its own tokenizer, whatever the data.

    Raises:
        UserError: if it is no configuration.
    """
    try:
        values = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{run.config} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f"{run.config} must hold keys with values, got {type(values).__name__}")
    trainer, tokenizer = values.get("trainer") or {}, (values.get("data") or {}).get("tokenizer")
    values["trainer"] = {key: value for key, value in trainer.items() if key not in OF_TRAINING}
    if tokenizer and run.tokenizer.is_file():
        tokenizer |= {"name": str(run.tokenizer), "vocab_size": None}
    return _written(values)


def _written(values: dict[str, Any]) -> Path:
    folder = tempfile.mkdtemp(prefix="kvpath-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "config.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix.rstrip("."): values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(_flat(value, f"{prefix}{key}."))
    return flat
