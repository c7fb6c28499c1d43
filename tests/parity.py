"""The same logits by every way of running a model: what each way gives, for tests to compare."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpath.attention import Index
from kvpath.inference import GrowingCache
from kvpath.model import Decoder

CLOSE = {"atol": 1e-10, "rtol": 0.0}
"""For float64, where only the order of sums may differ."""


@torch.no_grad()
def logits(model: Decoder, tokens_BT: Tensor, index: Index | None = None) -> Tensor:
    """Without a cache, as in training."""
    out = model(tokens_BT, index=index)
    assert isinstance(out, Tensor)
    return out


@torch.no_grad()
def chunked(model: Decoder, tokens_BT: Tensor, sizes: Sequence[int], index: Index | None = None) -> Tensor:
    """Through a cache, in chunks of these sizes; ones fill what is left."""
    cache, out, start = GrowingCache(model.layout), [], 0
    sizes = [*sizes, *[1] * (tokens_BT.shape[1] - sum(sizes))]
    for size in sizes:
        part = slice(start, start + size)
        out.append(model(tokens_BT[:, part], index=None if index is None else cut(index, part), store=cache))
        start += size
    return torch.cat(out, dim=1)


def cut(index: Index, part: slice) -> Index:
    """Some of the tokens of an index."""
    valid, documents = (None if row is None else row[:, part] for row in (index.valid, index.documents))
    return Index(index.positions[:, part], valid, documents)


def left_padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows of different lengths as one batch: tokens and validity, (B, T). Padding holds a token like any other."""
    longest = max(map(len, rows))
    tokens_BT = torch.stack([torch.cat((torch.full((longest - len(row),), 5), row)) for row in rows])
    valid_BT = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows])
    return tokens_BT, valid_BT


@torch.no_grad()
def padded_chunks(model: Decoder, rows: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """The logits of each row's own tokens, from one left-padded batch through a cache in chunks."""
    tokens_BT, valid_BT = left_padded(rows)
    cache, out, start = GrowingCache(model.layout), [], 0
    for size in sizes:
        part = slice(start, start + size)
        index = cache.place(tokens_BT[:, part], valid_BT[:, part])
        out.append(model(tokens_BT[:, part], index=index, store=cache))
        start += size
    assert start == tokens_BT.shape[1]
    whole = torch.cat(out, dim=1)
    return [whole[row, -len(own) :] for row, own in enumerate(rows)]


def packed(documents: Sequence[Tensor]) -> tuple[Tensor, Index]:
    """Documents one after the other in one row: tokens (1, T) and where they stand."""
    positions = torch.cat([torch.arange(len(own)) for own in documents])[None]
    number = torch.cat([torch.full((len(own),), which) for which, own in enumerate(documents)])[None]
    return torch.cat(list(documents))[None], Index(positions, documents=number)
