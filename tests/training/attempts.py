"""What the tests of resumes run: attempts at a toy run, here on one rank, or as a script on two.

As a script it takes a JSON list of the arguments of `attempt`, and writes what each found to a JSON file.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from kvpath.data import Budget, Files, PackedText, TokenizerConfig
from kvpath.errors import UserError
from kvpath.training.saving import Saving
from tests.training.toys import SEQ_LEN, SEQUENCES, Record, toy_module, toy_trainer, weights

STEPS, VALIDATE = 9, 2


def toy_text(corpus: str, tokenizer: str, micro_batch: int = 1, **changes: Any) -> PackedText:
    """Nine steps of 4 x 16 tokens, by a finished tokenizer."""
    budget = Budget(STEPS * SEQUENCES * SEQ_LEN, global_batch_sequences=SEQUENCES, micro_batch=micro_batch)
    plain = dict(seq_len=SEQ_LEN, budget=budget, holdout_every=5)
    return PackedText(Files([corpus]), TokenizerConfig(tokenizer), **{**plain, **changes})


def attempt(
    corpus: str,
    tokenizer: str,
    run: str,
    stop: int = STEPS,
    resume: bool = False,
    ranks: int = 1,
    **data: Any,
) -> dict[str, Any]:
    """Train up to step `stop` in the directory `run`; the final state is in `last.ckpt`, the weights beside it.

    Args:
        corpus: the file to train on.
        tokenizer: its file.
        run: a directory, for this and later attempts.
        stop: optimizer steps after which to end.
        resume: go on from its last checkpoint.
        ranks: how many.
        data: of the data module.
    """
    folder = Path(run)
    record, saving = Record(), Saving(folder, every="1000 steps")
    module, text = toy_module(), toy_text(corpus, tokenizer, **data)
    trainer = toy_trainer(
        record,
        saving,
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_steps=stop,
        val_check_interval=VALIDATE,
        check_val_every_n_epoch=None,
        enable_checkpointing=True,
    )
    trainer.fit(module, text, ckpt_path=str(saving.last) if resume else None, weights_only=True)
    found = {"hash": text.stream_hash(), "validated": record.validated, "losses": record.losses}
    if trainer.is_global_zero:
        torch.save(weights(module), folder / "weights.pt")
    return found


def outcome(**arguments: Any) -> dict[str, Any]:
    """What an attempt found, or the user's mistake that it ended with."""
    try:
        return attempt(**arguments)
    except UserError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    found = [outcome(**arguments, ranks=2) for arguments in json.loads(sys.argv[1])]
    Path(sys.argv[2]).write_text(json.dumps(found))
