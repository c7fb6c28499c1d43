"""Whether a checkpoint was trained on the data at hand, so that a run can go on in it."""

from collections.abc import Mapping
from typing import Any

from kvpath.data.sources import Source
from kvpath.data.tokenizer import Tokenizer
from kvpath.errors import UserError


def check_tokenizer(trained_with: str, tokenizer: Tokenizer, name: str) -> None:
    """Refuse another tokenizer.

    Args:
        trained_with: fingerprint of the tokenizer that the weights were trained with.
        tokenizer: that of the data.
        name: what it was asked for by.

    Raises:
        UserError: they differ.
    """
    if trained_with != tokenizer.fingerprint:
        raise UserError(
            f"data.tokenizer {name!r} is not the one that the checkpoint was trained with; state its tokenizer.json (in"
            " the run directory) as data.tokenizer.name, with vocab_size null"
        )


def check_tokens(state: Mapping[str, Any], training_tokens: int | None, source: Source) -> None:
    """Refuse a source that has grown or shrunk.

    Args:
        state: what the checkpoint remembers of the data.
        training_tokens: tokens that there are to train on; None for a stream, which is not counted.
        source: of the data; it may be gone where only other text is read.

    Raises:
        UserError: naming both numbers.
    """
    before = state["training_tokens"]
    if before is not None and training_tokens is not None and before != training_tokens:
        raise UserError(
            f"data.source {source.label} had {before:,} training tokens when the run began and has {training_tokens:,}:"
            " that changes the data of a run; --allow '[data]' allows it"
        )


def check_ranks(state: Mapping[str, Any], count: int) -> None:
    """Refuse another number of ranks, for a stream.

    Args:
        state: what the checkpoint remembers of the data.
        count: ranks of this run.

    Raises:
        UserError: naming both numbers.
    """
    if state["world_size"] != count:
        raise UserError(
            f"data.stream: the checkpoint is of {state['world_size']} ranks, and here are {count}: a stream goes on"
            " with as many ranks as it had; a tokenised corpus with any; --allow '[data]' reads again all that came"
            " before"
        )
