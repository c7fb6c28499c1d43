"""What preparing would give, by a sample."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpath.data.shards import ShardPlan
from kvpath.data.sources import Part, Source
from kvpath.data.tokenizer import Tokenizer

_SAMPLED_PARTS = 8
_SAMPLED_CHARACTERS = 2**20


@dataclass(frozen=True)
class Estimate:
    """What preparing would give, by a sample.

    Args:
        parts: parts of the source.
        sampled_documents: documents read.
        documents: in all; None if the size of the source is not known.
        tokens: in all, end-of-text tokens included.
        text_bytes: UTF-8 bytes of text in all.
        file_bytes: bytes that the shards would take.
        bytes_per_second: of text, as fast as the sample was read and tokenised in this process.
    """

    parts: int
    sampled_documents: int
    documents: int | None
    tokens: int | None
    text_bytes: int | None
    file_bytes: int | None
    bytes_per_second: float

    def describe(self, plan: ShardPlan) -> str:
        """For people, a line each."""
        rows = {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes of text": self.text_bytes,
            "bytes of shards": self.file_bytes,
        }
        found = [f"about {n:,} {name}" if n is not None else f"{name}: not known" for name, n in rows.items()]
        return "\n".join(
            [
                f"{plan.label}: by {self.sampled_documents:,} documents of {self.parts:,} parts",
                *found,
                f"read and tokenised by one process at {self.bytes_per_second / 1e6:.2f} MB of text a second",
            ]
        )


def estimate(source: Source, tokenizer: Tokenizer, plan: ShardPlan) -> Estimate:
    """Read the front of up to eight parts, spread over the source; writes nothing.

    Raises:
        UserError: for what cannot be read.
    """
    parts = source.parts()
    n_chosen = min(_SAMPLED_PARTS, len(parts))
    chosen = [parts[i * len(parts) // n_chosen] for i in range(n_chosen)]
    started = time.perf_counter()
    samples = [_sample(part, tokenizer) for part in chosen]
    seconds = time.perf_counter() - started
    read = [sum(counts) for counts in zip(*(sample.counts for sample in samples), strict=True)]
    whole = _scaled_up(samples, _size(parts) / _size(chosen))
    if whole is not None and plan.max_tokens is not None:
        share = min(1.0, plan.max_tokens / max(1, whole[1]))
        whole = [int(n * share) for n in whole]
    documents, tokens, text_bytes = whole or (None, None, None)
    file_bytes = None
    if documents is not None and tokens is not None:
        file_bytes = tokens * plan.item_bytes("tokens") + documents * plan.item_bytes("offsets")
    return Estimate(len(parts), read[0], documents, tokens, text_bytes, file_bytes, read[2] / max(seconds, 1e-9))


class _Sample(NamedTuple):
    counts: tuple[int, int, int]
    """Documents, tokens, UTF-8 bytes."""

    fraction: float | None
    """What of the part they are."""


def _sample(part: Part, tokenizer: Tokenizer) -> _Sample:
    numbered = part.numbered()
    texts, characters = [], 0
    for _, text in numbered:
        texts.append(text)
        characters += len(text)
        if characters >= _SAMPLED_CHARACTERS:
            break
    fraction = part.fraction  # before `numbered` goes, and with it the file
    n_tokens = int(tokenizer.encode_joined(texts)[1].sum())
    return _Sample((len(texts), n_tokens, sum(len(text.encode()) for text in texts)), fraction)


def _scaled_up(samples: list[_Sample], scale: float) -> list[int] | None:
    """The counts of whole parts, times a factor; None if it is not known what of its part a sample is."""
    totals = [0.0, 0.0, 0.0]
    for counts, fraction in samples:
        if not fraction:
            return None
        totals = [total + n / fraction for total, n in zip(totals, counts, strict=True)]
    return [round(total * scale) for total in totals]


def _size(parts: Sequence[Part]) -> float:
    """Of all together: bytes if those are known, else their number."""
    sizes = [part.n_bytes for part in parts]
    return float(sum(size for size in sizes if size is not None)) if None not in sizes else float(len(sizes))
