"""Where a stage that takes its weights from a run goes on in the data."""

from typing import Any

import yaml

from kvpath.training.run_directory import find_checkpoint, run_of
from kvpath.training.say import rank_zero_say
from kvpath.training.stored_config import stored_step

_STREAM = ("source", "tokenizer", "holdout_every", "max_tokens", "stream")


def tokens_seen(init_from: str, data: dict[str, Any]) -> int:
    """Tokens of its stream that the run of `init_from` has seen; 0, with a line that says why, if ours is another.

    Args:
        init_from: a run directory or a checkpoint in one.
        data: the data section of the configuration of the stage to come.
    """
    checkpoint = find_checkpoint(init_from, "init_from")
    run = run_of(checkpoint)
    if run is None:
        rank_zero_say(f"{init_from} lies in no run: the data begins at its front")
        return 0
    before = yaml.safe_load(run.config.read_text(encoding="utf-8"))["data"]
    then, now = stream_of(before), stream_of(data)
    other = [key for key in then if then[key] != now.get(key)]
    if other:
        rank_zero_say(
            f"{init_from} was trained on another stream (data.{other[0]} was {then[other[0]]},"
            f" is {now.get(other[0])}): the data begins at its front"
        )
        return 0
    budget, seq_len = before["budget"], before["seq_len"]
    start = before["start_tokens"] or 0
    if not before["stream"]:
        start = -(-start // seq_len) * seq_len  # it began with a whole window
    per_step = budget["global_batch_tokens"] or budget["global_batch_sequences"] * seq_len
    seen = start + stored_step(checkpoint) * int(per_step)
    rank_zero_say(f"the data goes on after the {seen:,} tokens that {init_from} has seen")
    return seen


def stream_of(data: dict[str, Any]) -> dict[str, Any]:
    """The values that decide which token follows which, of the data section of a configuration."""
    values = {key: data.get(key) for key in _STREAM} | {"packing": data.get("packing") or "contiguous"}
    if data.get("packing") == "best_fit":
        values |= {"packing_documents": data.get("packing_documents"), "seq_len": data.get("seq_len")}
    if data.get("stream"):
        values |= {"lanes": data.get("lanes")}
    else:
        values |= {"seed": data.get("seed"), "shuffle_block": data.get("shuffle_block") or data.get("seq_len")}
    return values
