"""What a task of lm-evaluation-harness says of generation, as our `SamplingConfig` has it."""

from collections.abc import Mapping
from typing import Any

from kvpath.errors import UserError

MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""All of them mean the same; the first that is there holds."""

_OURS = ("top_k", "top_p", "min_p", "repetition_penalty", "seed")
_NEUTRAL: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1, "length_penalty": 1, "use_cache": True}
"""Fields of others that a task may state as long as they change nothing."""


def sampling_fields(wanted: Mapping[str, Any], default_max_tokens: int) -> dict[str, Any]:
    """The fields of `SamplingConfig`.

    Without `do_sample` a temperature above 0 draws, and everything else takes the likeliest token.

    Args:
        wanted: `until`, `max_gen_toks`, `do_sample`, `temperature`, ... as in a task or in `--gen_kwargs`.
        default_max_tokens: where the task does not say.

    Raises:
        UserError: it asks for something that there is not, each field named.
    """
    rest = {name: value for name, value in wanted.items() if value is not None}
    limits = [rest.pop(name) for name in MAX_TOKENS if name in rest]
    until = rest.pop("until", [])
    temperature = rest.pop("temperature", None)
    draws = rest.pop("do_sample", bool(temperature))
    fields = {name: rest.pop(name) for name in _OURS if name in rest}
    if fields.get("top_k") == 0:  # as others say that all tokens may be drawn
        del fields["top_k"]
    UserError.raise_all(
        f"gen_kwargs: {name}={value!r} is not to be had; there are until, max_gen_toks, do_sample, temperature,"
        f" {', '.join(_OURS)}"
        for name, value in rest.items()
        if name not in _NEUTRAL or value != _NEUTRAL[name]
    )
    return {
        "max_new_tokens": int(limits[0]) if limits else default_max_tokens,
        "temperature": float(1 if temperature is None else temperature) if draws else 0.0,
        "stop": [string for string in ([until] if isinstance(until, str) else until) if string],
        **fields,
    }
