"""A batch that was put aside: tensors as safetensors, and beside them what a person wants to read, as JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvpath.errors import UserError
from kvpath.training.whole_files import write_whole

_RANDOM = "random_state."


@dataclass(frozen=True, kw_only=True)
class BadBatch:
    """What one rank trained on in a step that was not taken."""

    tensors: dict[str, Tensor]
    """The batch: `tokens` and `labels` (A, M, T) int64, and what else it carried, such as `documents`."""

    random_state: dict[str, Tensor]
    """Of the generators of the CPU and, where there is one, of the CUDA device, before the next step."""

    step: int
    """From 1, as in metrics.jsonl."""

    rank: int
    reason: str
    """Why the step was not taken."""

    precision: str
    """The Trainer's, such as bf16-mixed."""

    documents: list[list[int]] | None = None
    """Of each sequence: the numbers of its documents among those of the training region, from 0. None of a stream."""

    text: list[str] | None = None
    """Of each sequence, if there was a tokenizer."""

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"step-{self.step:06}-rank{self.rank}"

    def write(self, folder: Path) -> Path:
        """Write both files; gives the one with the tensors."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.safetensors"
        tensors = self.tensors | {_RANDOM + name: state for name, state in self.random_state.items()}
        names = [field.name for field in fields(self) if field.name not in ("tensors", "random_state")]
        facts = {name: getattr(self, name) for name in names}
        write_whole(path, save({name: value.contiguous() for name, value in tensors.items()}))
        write_whole(path.with_suffix(".json"), json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
        return path

    @classmethod
    def read(cls, path: Path) -> "BadBatch":
        """Read both files, of which either may be named.

        Raises:
            UserError: one of them is missing, damaged, or no such batch.
        """
        path = path.with_suffix(".safetensors")
        try:
            stored = load(path.read_bytes())
            facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"{path} is no batch that a run put aside: {' '.join(str(error).split())}") from error
        random_state = {name.removeprefix(_RANDOM): stored.pop(name) for name in list(stored) if _RANDOM in name}
        problems = [
            f"{name} must be (A, M, T) int64, got {tuple(stored[name].shape)} {stored[name].dtype}"
            if name in stored
            else f"{name} is missing"
            for name in ("tokens", "labels")
            if name not in stored or stored[name].dim() != 3 or stored[name].dtype != torch.int64
        ]
        known = {name: facts[name] for name in cls.__dataclass_fields__ if isinstance(facts, dict) and name in facts}
        problems += [f"{name} is missing" for name in ("step", "rank", "reason", "precision") if name not in known]
        UserError.raise_all(f"{path} is no batch that a run put aside: {problem}" for problem in problems)
        return cls(tensors=stored, random_state=random_state, **known)


def as_put_aside(batch: Mapping[str, Tensor], data: Any | None, **facts: Any) -> BadBatch:
    """A batch of this rank, with its text and the random state of now.

    Args:
        batch: of the step that comes next.
        data: the data module, if there is one.
        facts: fields of `BadBatch`.
    """
    tokenizer, documents = getattr(data, "tokenizer", None), getattr(data, "document_numbers", lambda: None)
    tensors = {name: value.detach().cpu() for name, value in batch.items() if isinstance(value, Tensor)}
    random_state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random_state["cuda"] = torch.cuda.get_rng_state()
    rows = tensors["tokens"].flatten(0, -2).tolist()
    return BadBatch(
        tensors=tensors,
        random_state=random_state,
        documents=documents(),
        text=None if tokenizer is None else [tokenizer.decode(row, skip_special_tokens=False) for row in rows],
        **facts,
    )
