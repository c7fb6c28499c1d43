"""Where a stage that takes its weights from a run goes on in the data."""

from typing import Any

import yaml

from kvpath.training.run_directory import find_checkpoint, run_of
from kvpath.training.say import rank_zero_say
from kvpath.training.stored_config import stored_step

_SAME_STREAM = ("source", "tokenizer", "holdout_every", "seed", "shuffle_block", "stream")


def tokens_seen(init_from: str, data: dict[str, Any]) -> int:
    """Tokens of its stream that the run of `init_from` has seen; 0, with a line that says why, if ours is another.

    Args:
        init_from: a run directory or a checkpoint in one.
        data: the data section of the configuration of the stage to come.
    """
    checkpoint = find_checkpoint(init_from)
    run = run_of(checkpoint)
    if run is None:
        rank_zero_say(f"{init_from} lies in no run: the data begins at its front")
        return 0
    before = yaml.safe_load(run.config.read_text(encoding="utf-8"))["data"]
    other = [key for key in _SAME_STREAM if before.get(key) != data.get(key)]
    if other:
        rank_zero_say(f"{init_from} was trained on another stream (data.{other[0]}): the data begins at its front")
        return 0
    budget = before["budget"]
    per_step = budget["global_batch_tokens"] or budget["global_batch_sequences"] * before["seq_len"]
    seen = (before["start_tokens"] or 0) + stored_step(checkpoint) * int(per_step)
    rank_zero_say(f"the data goes on after the {seen:,} tokens that {init_from} has seen")
    return seen
