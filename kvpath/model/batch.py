"""A batch of sequences as the data makes it and the model reads it."""

from collections.abc import Mapping

from torch import Tensor

from kvpath.attention.context import Index

Batch = Mapping[str, Tensor]


def index_of(batch: Batch) -> Index | None:
    """Where the tokens of a batch stand; None if attention crosses documents, from the first token to the last."""
    return Index(batch["positions"], documents=batch["documents"]) if "documents" in batch else None
