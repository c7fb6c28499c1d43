"""An exported model: one directory with weights, configuration and tokenizer, and nothing of the run around it.

- `model.safetensors`: the weights under the names of the decoder's `state_dict`; a tied one is stored once.
- `config.json`: see `ExportedConfig`.
- `tokenizer.json`: if the model has one.
"""

import dataclasses
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvpath.data.tokenizer import Tokenizer
from kvpath.errors import UserError
from kvpath.model.decoder import Decoder
from kvpath.training.stored_config import FORMAT_VERSION, check_format, to_plain
from kvpath.version import __version__

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class ExportedConfig:
    """What `config.json` holds."""

    backbone: dict[str, Any]
    """The model, as plain values."""

    tied: dict[str, str] = field(default_factory=dict)
    """Weights that are not stored, since they are another one."""

    step: int = 0
    """The optimizer step of the run that they come from."""

    end_of_text: str | None = None
    """The tokenizer's token that ends a document; None without a tokenizer."""

    data: dict[str, Any] | None = None
    """The data section of the run's configuration, if it came from a run."""

    format_version: int = FORMAT_VERSION
    written_by: str = __version__
    """The version of kvpath."""

    @classmethod
    def read(cls, path: Path) -> "ExportedConfig":
        """Read and check a `config.json`.

        Raises:
            UserError: if it is missing, damaged, or of another format.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise UserError(f"{path} must hold an object, got {type(values).__name__}")
        check_format(values, path)
        known = [entry.name for entry in dataclasses.fields(cls)]
        UserError.raise_all(f"{path}: {key} is not a key of this format" for key in values if key not in known)
        if not isinstance(values.get("backbone"), dict):
            raise UserError(f"{path}: backbone must hold the model's configuration, got {values.get('backbone')!r}")
        return cls(**values)


def write_export(
    directory: Path, model: Decoder, tokenizer: Tokenizer | None, step: int = 0, data: dict[str, Any] | None = None
) -> None:
    """Write a new directory, whole or not at all.

    Args:
        directory: where; it must not exist yet.
        model: its weights are stored in the dtype that they have.
        tokenizer: what made its tokens, if that is known.
        step: the optimizer step of the run.
        data: the data section of the run's configuration.

    Raises:
        UserError: if the directory exists.
    """
    if directory.exists():
        raise UserError(f"output {directory}: it exists already; name a new directory")
    weights, tied = _without_copies(model.state_dict())
    config = ExportedConfig(
        backbone=to_plain(model.config),
        tied=tied,
        step=step,
        end_of_text=tokenizer.end_of_text_token if tokenizer else None,
        data=data,
    )
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, since a rename is atomic only within one file system.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".part", dir=directory.parent))
    try:
        save_file(weights, unfinished / WEIGHTS, metadata={"format_version": str(FORMAT_VERSION)})
        text = json.dumps(dataclasses.asdict(config), indent=2, ensure_ascii=False) + "\n"
        (unfinished / CONFIG).write_text(text, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(unfinished / TOKENIZER)
        for file in unfinished.iterdir():
            file.chmod(0o644)
            with file.open("rb") as written:
                os.fsync(written.fileno())
        unfinished.chmod(0o755)  # temporary ones are private
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def is_export(path: Path) -> bool:
    """Whether a file is the weights of an exported directory."""
    return path.suffix == ".safetensors"


def read_export(weights: Path) -> tuple[ExportedConfig, dict[str, Tensor]]:
    """The configuration beside a `model.safetensors`, and all weights, tied ones too.

    Raises:
        UserError: if a file is missing, damaged, or of another format.
    """
    config = ExportedConfig.read(weights.with_name(CONFIG))
    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{weights} is damaged, or no safetensors file: {error}") from error
    return config, {**tensors, **{copy: tensors[of] for copy, of in config.tied.items() if of in tensors}}


def _without_copies(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors that have memory of their own, and for each other one the name of the first that it equals."""
    first: dict[tuple[object, ...], str] = {}
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        name_of = first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), name)
        if name_of == name:
            kept[name] = tensor.contiguous()
        else:
            tied[name] = name_of
    return kept, tied
