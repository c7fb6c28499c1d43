"""What is on disk of a trained model: weights, configuration, tokenizer, wherever they lie."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from kvpath.config import backbone_from, build_model, data_from
from kvpath.data.tokenizer import Tokenizer, TokenizerConfig
from kvpath.interop.exported import TOKENIZER
from kvpath.model.decoder import Decoder
from kvpath.training.module import check_shapes, shapes_of
from kvpath.training.run_directory import find_checkpoint, run_of
from kvpath.training.stored_config import read_checkpoint


@dataclass(frozen=True)
class StoredModel:
    """What a checkpoint or an export holds."""

    checkpoint: Path
    weights: dict[str, Tensor]
    """Under the names of the decoder's `state_dict`."""

    backbone: dict[str, Any]
    step: int
    data: dict[str, Any] | None
    """The data section of the run's configuration, if there is a run."""

    end_of_text: str | None
    """The token that ends a document, if that is known."""

    @classmethod
    def read(cls, path: str | Path) -> "StoredModel":
        """Find and read it; the weights are mapped, not copied.

        Raises:
            UserError: there are no weights, they are damaged, or of another format.
        """
        checkpoint = find_checkpoint(path)
        stored = read_checkpoint(checkpoint)
        own, run = stored["kvpath"], run_of(checkpoint)
        data = own.get("data") if run is None else yaml.safe_load(run.config.read_text(encoding="utf-8"))["data"]
        return cls(
            checkpoint=checkpoint,
            weights={name.removeprefix("model."): value for name, value in stored["state_dict"].items()},
            backbone=own["backbone"],
            step=stored["global_step"],
            data=data,
            end_of_text=own.get("end_of_text") if run is None else data["tokenizer"]["end_of_text"],
        )

    def build(self) -> Decoder:
        """The model with these weights, in their dtype.

        Raises:
            UserError: the configuration is not that of a model, or not of this one.
        """
        model = build_model(backbone_from(self.backbone))
        check_shapes(shapes_of(model.state_dict()), shapes_of(self.weights), self.checkpoint)
        model.to(self.weights["embedding.weight"].dtype).load_state_dict(self.weights)
        return model

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the run or the export; for a run that holds none, what its data configuration gives."""
        run = run_of(self.checkpoint)
        if run is not None and not run.tokenizer.is_file():
            assert self.data is not None
            return data_from(self.data).load_tokenizer()
        if self.end_of_text is None:
            return None
        file = run.tokenizer if run is not None else self.checkpoint.with_name(TOKENIZER)
        return TokenizerConfig(str(file), end_of_text=self.end_of_text).load()
