"""What is wrong with the fields of a data module, before anything is read."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpath.data.retrieval import Task

if TYPE_CHECKING:
    from kvpath.data.datamodule import PackedText


def field_problems(data: "PackedText") -> Iterator[str]:
    """All mistakes, each with the field, its value and what would be right."""
    yield from _too_small(data)
    if data.seq_len > 0 and (data.shuffle_block < 1 or data.shuffle_block % data.seq_len):
        yield f"shuffle_block must be a multiple of seq_len {data.seq_len}, got {data.shuffle_block}"
    yield from _problems_of_evaluation(data)
    yield from _problems_of_task(data)
    if not data.eval_contexts:
        yield "eval_contexts must name at least one context length, got []"
    if data.stream:
        yield from _problems_of_stream(data)


def _too_small(data: "PackedText") -> Iterator[str]:
    at_least = {
        "seq_len": (data.seq_len, 1),
        "start_tokens": (data.start_tokens, 0),
        "holdout_every": (data.holdout_every, 3),
        "max_tokens": (data.max_tokens, 1),
        "eval_batch_tokens": (data.eval_batch_tokens, 1),
        "eval_limit_tokens": (data.eval_limit_tokens, 1),
        "num_workers": (data.num_workers, 0),
        "lanes": (data.lanes, 1),
        "packing_documents": (data.packing_documents, 1),
        **{f"eval_contexts[{i}]": (context, 1) for i, context in enumerate(data.eval_contexts)},
    }
    for name, (value, least) in at_least.items():
        if value is not None and value < least:
            yield f"{name} must be at least {least}, got {value}"


def _problems_of_evaluation(data: "PackedText") -> Iterator[str]:
    texts = data.evaluate or {}
    if data.eval_stride is not None and not 1 <= data.eval_stride <= min(data.eval_contexts, default=1):
        shortest = f"the shortest of eval_contexts {data.eval_contexts}"
        yield f"eval_stride must be from 1 to {shortest}, got {data.eval_stride}"
    if data.evaluate is not None and not texts:
        yield "evaluate must name at least one text, or be null, got {}"
    for name, text in texts.items():
        yield from text.problems(name)
    if len({isinstance(text.source, Task) for text in texts.values()}) > 1:
        yield (f"evaluate must name texts or tasks, got both in {sorted(texts)}: their results go to different files")
    if data.asks and data.eval_stride is not None:
        yield f"eval_stride must be null for tasks, got {data.eval_stride}"


def _problems_of_task(data: "PackedText") -> Iterator[str]:
    """Of a source that makes its sequences: most of what is about documents is not for it."""
    if not isinstance(data.source, Task):
        return
    for problem in data.source.problems():
        yield f"source.{problem}"
    wanted = {
        "holdout_every": (data.holdout_every, None),
        "max_tokens": (data.max_tokens, None),
        "stream": (data.stream, False),
        "packing": (data.packing, "contiguous"),
        "document_masking": (data.document_masking, False),
    }
    for name, (given, value) in wanted.items():
        if given != value:
            yield f"{name} must be {'null' if value is None else value} with source {data.source.label}, got {given}"


def _problems_of_stream(data: "PackedText") -> Iterator[str]:
    if data.budget.tokens is None:
        yield "budget.tokens must be stated with stream: true, got null: a stream has no length"
    if data.max_tokens is not None:
        yield (
            f"max_tokens must be null with stream: true, got {data.max_tokens}: state budget.tokens, or max_documents"
            " of the source"
        )
    if data.tokenizer_config.is_trained_here:
        yield "tokenizer.name must name a finished tokenizer with stream: true, got 'train'"
    if data.holdout_every is not None and data.eval_limit_tokens is None:
        yield "eval_limit_tokens must be stated with stream: true and holdout_every, got null"
