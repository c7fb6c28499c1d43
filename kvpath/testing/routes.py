"""Ways of running a model through a cache, each compared with one pass that has none.

Every function takes a toy and gives the largest difference of logits over its comparisons. Caches have blocks of four
tokens, so that all of them grow on the way.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvpath.attention.context import Index
from kvpath.inference.cache import Cache
from kvpath.model.decoder import Decoder
from kvpath.testing.toys import Toy, tokens

LENGTH = 11
CHUNKS = ([3, 1, 5, 2], [2, 7, 2])
LENGTHS = (4, 11, 7)
"""Of the rows of a padded batch."""

Prepare = Callable[[Decoder], Decoder]


def as_built(model: Decoder) -> Decoder:
    """The modules that are trained."""
    return model


def compacted(model: Decoder) -> Decoder:
    """With the strategy's fast path for decoding, where there is one."""
    model.eval().compact()
    return model


@torch.no_grad()
def logits(model: Decoder, tokens_BT: Tensor, index: Index | None = None) -> Tensor:
    """Without a cache, as in training."""
    out = model(tokens_BT, index=index)
    assert isinstance(out, Tensor)
    return out


def new_cache(model: Decoder, batch: int, block: int = 4) -> Cache:
    """An empty cache in the dtype and on the device of a model."""
    weight = model.embedding.weight
    return Cache(model.layout, batch, dtype=weight.dtype, device=weight.device, block=block)


@torch.no_grad()
def continued(
    model: Decoder, cache: Cache, tokens_BT: Tensor, sizes: Sequence[int], index: Index | None = None
) -> Tensor:
    """Logits of all tokens, in passes of these sizes; single tokens where these are fewer."""
    out, start = [], 0
    for size in [*sizes, *[1] * (tokens_BT.shape[1] - sum(sizes))]:
        part = slice(start, start + size)
        out.append(model(tokens_BT[:, part], index=None if index is None else cut(index, part), store=cache))
        start += size
    return torch.cat(out, dim=1)


def through_cache(model: Decoder, tokens_BT: Tensor, sizes: Sequence[int], index: Index | None = None) -> Tensor:
    """As `continued`, from an empty cache."""
    return continued(model, new_cache(model, len(tokens_BT)), tokens_BT, sizes, index)


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
    """The logits of each row's own tokens, from one left-padded batch through a cache in passes of these sizes."""
    tokens_BT, valid_BT = left_padded(rows)
    cache, out, start = new_cache(model, len(rows)), [], 0
    for size in sizes:
        part = slice(start, start + size)
        index = cache.place(tokens_BT[:, part], valid_BT[:, part])
        out.append(model(tokens_BT[:, part], index=index, store=cache))
        start += size
    whole = torch.cat(out, dim=1)
    return [whole[row, -len(own) :] for row, own in enumerate(rows)]


def packed(documents: Sequence[Tensor]) -> tuple[Tensor, Index]:
    """Documents one after the other in one row: tokens (1, T) and where they stand."""
    positions = torch.cat([torch.arange(len(own)) for own in documents])[None]
    number = torch.cat([torch.full((len(own),), which) for which, own in enumerate(documents)])[None]
    return torch.cat(list(documents))[None], Index(positions, documents=number)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest absolute difference; NaN if there is one."""
    return float((found.detach() - expected.detach()).abs().max())


def worst(differences: Sequence[float]) -> float:
    """The largest of some; NaN if one is."""
    return float(torch.tensor(differences, dtype=torch.float64).max())


def some_rows() -> list[Tensor]:
    """Rows of the lengths of a padded batch."""
    return [tokens(length, seed=length) for length in LENGTHS]


def in_passes(toy: Toy, *plans: Sequence[int], prepare: Prepare = as_built) -> float:
    """A batch of two through a cache, in passes of the sizes of each plan."""
    tokens_BT = tokens(2, LENGTH)
    expected = logits(toy.decoder(), tokens_BT)
    model = prepare(toy.decoder())
    return worst([difference(through_cache(model, tokens_BT, sizes), expected) for sizes in plans])


def one_shot(toy: Toy) -> float:
    """All tokens in one pass."""
    return in_passes(toy, [LENGTH])


def chunked(toy: Toy) -> float:
    """Chunks of odd sizes."""
    return in_passes(toy, *CHUNKS)


def token_by_token(toy: Toy) -> float:
    """From the first token on, and after a prefill."""
    return in_passes(toy, [], [6])


def padded_without_cache(toy: Toy) -> float:
    """Rows of different lengths, padded on the left, in one pass without a cache."""
    model, rows = toy.decoder(), some_rows()
    tokens_BT, valid_BT = left_padded(rows)
    whole = logits(model, tokens_BT, Index((valid_BT.cumsum(1) - 1).clamp(min=0), valid_BT))
    return worst(
        [difference(found[-len(row) :], logits(model, row[None])[0]) for row, found in zip(rows, whole, strict=True)]
    )


def padded(toy: Toy, prepare: Prepare = as_built) -> float:
    """Rows of different lengths, padded on the left, through a cache: at once, in chunks and token by token."""
    plain, rows = toy.decoder(), some_rows()
    expected = [logits(plain, row[None])[0] for row in rows]
    model = prepare(toy.decoder())
    return worst(
        [
            difference(found, alone)
            for sizes in ([LENGTH], [3, 1, 5, 2], [1] * LENGTH)
            for found, alone in zip(padded_chunks(model, rows, sizes), expected, strict=True)
        ]
    )


def documents(toy: Toy, prepare: Prepare = as_built) -> float:
    """Documents packed into one row, without a cache and through one."""
    plain, parts = toy.decoder(), [tokens(length, seed=length) for length in (5, 1, 6)]
    expected = torch.cat([logits(plain, own[None])[0] for own in parts])[None]
    tokens_1T, index = packed(parts)
    model = prepare(toy.decoder())
    found = [through_cache(model, tokens_1T, sizes, index) for sizes in ([12], [5, 2, 4, 1], [])]
    return worst([difference(one, expected) for one in (logits(plain, tokens_1T, index), *found)])


@torch.no_grad()
def last_positions(toy: Toy, prepare: Prepare = as_built) -> float:
    """A prefill that computes no more than the last positions need, and the tokens after it."""
    earlier, later = (0, 2, 7), 2
    tokens_BT = tokens(2, max(earlier) + LENGTH + later)
    expected = logits(toy.decoder(), tokens_BT)
    model, found = prepare(toy.decoder()), []
    for start in earlier:
        end = start + LENGTH
        for wanted in (1, 4):
            cache = new_cache(model, 2)
            if start:
                model(tokens_BT[:, :start], store=cache)
            last = model(tokens_BT[:, start:end], store=cache, wanted=wanted)
            after = continued(model, cache, tokens_BT[:, end : end + later], [])
            found.append(difference(torch.cat((last, after), dim=1), expected[:, end - wanted : end + later]))
    return worst(found)


@torch.no_grad()
def reordered(toy: Toy, prepare: Prepare = as_built) -> float:
    """Rows of a padded batch exchanged, doubled and dropped between two tokens, and rows forked."""
    plain, rows, more = toy.decoder(), some_rows(), tokens(4, 3, seed=8)
    model = prepare(toy.decoder())
    tokens_BT, valid_BT = left_padded(rows)
    cache = new_cache(model, len(rows))
    model(tokens_BT, index=cache.place(tokens_BT, valid_BT), store=cache)
    forked = cache.fork(2)
    order = [2, 0, 2, 1]
    cache.reorder(torch.tensor(order))
    found = continued(model, cache, more, [])
    others = continued(model, forked, more.repeat(2, 1)[:6], [])
    differences = []
    for out, kept, new in ((found, order, more), (others, [0, 0, 1, 1, 2, 2], more.repeat(2, 1))):
        for row, source in enumerate(kept):
            alone = logits(plain, torch.cat((rows[source], new[row]))[None])[0, -3:]
            differences.append(difference(out[row], alone))
    return worst(differences)


@torch.no_grad()
def saved(toy: Toy) -> float:
    """Written to a file between two passes, and read; and a cache that is used again after a reset."""
    model, tokens_BT = toy.decoder(), tokens(2, LENGTH)
    cache = new_cache(model, 2)
    continued(model, cache, tokens_BT[:, :6], [4])
    with tempfile.TemporaryDirectory() as folder:
        cache.save(Path(folder) / "cache.safetensors")
        loaded = Cache.load(Path(folder) / "cache.safetensors", model.layout)
    expected = logits(model, tokens_BT)
    after = difference(continued(model, loaded, tokens_BT[:, 6:], [2]), expected[:, 6:])
    cache.reset()
    return worst([after, difference(continued(model, cache, tokens_BT, [5, 3]), expected)])


def compact(toy: Toy) -> float:
    """The fast path for decoding: after a prefill, from the first token on, in small chunks."""
    return in_passes(toy, [], [6], [3, 2, 1, 2], prepare=compacted)


def compact_padded(toy: Toy) -> float:
    """The fast path for rows of different lengths, packed documents, a prefill's last positions, reordered rows."""
    others = (padded, documents, last_positions, reordered)
    return worst([route(toy, prepare=compacted) for route in others])
