"""The same ids are other text to another tokenizer."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from kvpath.data.tokenizer import TokenizerConfig
from kvpath.errors import UserError
from kvpath.interop.exported import TOKENIZER
from kvpath.training.stored_config import read_checkpoint


class SameTokenizer(Callback):
    """Refuses to start from the weights of a run or an export that had another tokenizer than the data has."""

    def __init__(self, init_from: str, checkpoint: Path) -> None:
        """What the command line calls the weights, and their file."""
        self.init_from, self.checkpoint = init_from, checkpoint

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare."""
        datamodule = getattr(trainer, "datamodule", None)
        ours = getattr(getattr(datamodule, "tokenizer", None), "fingerprint", None)
        theirs = tokenizer_of(self.checkpoint, type(datamodule).__qualname__)
        if None not in (ours, theirs) and ours != theirs:
            raise UserError(
                f"init_from {self.init_from} was trained with another tokenizer than data.tokenizer: state its"
                " tokenizer.json, which lies in its directory, as data.tokenizer.name with vocab_size null, or allow"
                " it by --allow '[data]'"
            )


def tokenizer_of(checkpoint: Path, datamodule: str = "PackedText") -> str | None:
    """The fingerprint of the tokenizer that weights were trained with; None if it is not known.

    Args:
        checkpoint: the weights of a run or an export.
        datamodule: the name of the class whose state tells of it.
    """
    stored = read_checkpoint(checkpoint)
    end_of_text, file = stored["kvpath"].get("end_of_text"), checkpoint.with_name(TOKENIZER)
    if end_of_text is not None and file.is_file():  # an export
        return TokenizerConfig(str(file), end_of_text=end_of_text).load().fingerprint
    fingerprint = stored.get(datamodule, {}).get("tokenizer")
    return None if fingerprint is None else str(fingerprint)
