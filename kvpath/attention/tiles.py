"""The attention product in tiles, for passes that look back on a store without gradients.

Few queries on a CPU have a compiled function (`kvpath.attention.native`), which does the same with tiles of its own.

Parts over features are multiplied one by one, so stored entries are read where they lie and never joined. What is
made from them (expanded latents, rebuilt keys, entries in a wider dtype) exists for one tile of keys, scores for one
tile of queries and keys, in one running softmax: no temporary has more than `TILE_ELEMENTS`, but for a batch so large
that `FEWEST_KEYS` of its keys have.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpath.attention import native
from kvpath.attention.context import Context, Index
from kvpath.attention.product import Segment, attend

TILE_ELEMENTS = 2**18
"""What a tile holds, so that on a CPU it stays in the cache of a core."""

CUDA_TILE_ELEMENTS = 2**24
"""The same on a GPU, so that a tile fills the device."""

FEWEST_KEYS, MOST_KEYS, QUERY_ROWS = 64, 2048, 64


@dataclass(frozen=True)
class Rebuilt:
    """Keys or values that are made a tile at a time."""

    heads: int
    """Heads G of what is made."""

    dim: int
    """Features D of each head."""

    make: Callable[[slice], Tensor]
    """Gives a range of the S stored tokens, (B, s, G, D)."""


Part = Tensor | Rebuilt
"""Entries of all stored tokens, (B, S, G, D): where they lie, or as they are made."""


@dataclass(frozen=True)
class KeyRange:
    """Keys and values in parts over features, all over the same S tokens."""

    k: Sequence[Part]
    v: Sequence[Part]
    index: Index
    window: int | None = None


def attend_split(q_parts: Sequence[Tensor], segments: Sequence[Segment], context: Context) -> Tensor:
    """What `attend` gives, (B, T, H * V), without joining the parts of keys and values."""
    first = segments[0]
    q_BTHD = torch.cat(tuple(q_parts), dim=-1) if len(q_parts) > 1 else q_parts[0]
    ranges = [
        KeyRange(
            [part.values for part in segment.k],
            [part.values for part in segment.v],
            segment.k[0].index,
            segment.k[0].window,
        )
        for segment in segments
    ]
    scale = 1 / math.sqrt(q_BTHD.shape[-1])
    if (out_BTHV := _by_few([q_BTHD], ranges, context, scale)) is not None:
        return out_BTHV.to(q_BTHD.dtype).flatten(2)
    if len(segments) == len(first.k) == len(first.v) == 1:
        return attend(q_parts, segments, context)  # there is nothing to join
    parts = q_BTHD.split([part.values.shape[-1] for part in first.k], dim=-1)
    return torch.cat(_by_tiles(parts, ranges, context, scale), dim=-1).flatten(2)


def attend_in_tiles(
    q_parts: Sequence[Tensor], ranges: Sequence[KeyRange], context: Context, scale: float
) -> list[Tensor]:
    """softmax(scale * sum_i Q_i K_i^T) V_j for each part j of the values, over all ranges of keys in one softmax.

    Args:
        q_parts: (B, T, H, D_i), one for each part of the keys; a part with fewer heads than H is shared by groups.
        ranges: their parts have the same widths in each.
        context: positions, visibility.
        scale: what scores are multiplied by.

    Returns:
        (B, T, H, V_j) for each part of the values, not joined. A query that sees no key gives zeros.
    """
    if (out_BTHV := _by_few(q_parts, ranges, context, scale)) is not None:
        return list(out_BTHV.to(q_parts[0].dtype).split([_shape(part)[1] for part in ranges[0].v], dim=-1))
    return _by_tiles(q_parts, ranges, context, scale)


def _by_tiles(q_parts: Sequence[Tensor], ranges: Sequence[KeyRange], context: Context, scale: float) -> list[Tensor]:
    """`attend_in_tiles` by torch alone."""
    dtype, device = q_parts[0].dtype, q_parts[0].device.type
    widths = [_shape(part)[1] for part in ranges[0].v]
    if q_parts[0].shape[1] > QUERY_ROWS:
        # Joining a tile costs once for all queries, and then each has one product in place of several.
        q_parts, ranges = [torch.cat(tuple(q_parts), dim=-1)], [_joined(keys) for keys in ranges]
    # CPUs have no product of narrow numbers with a wide result.
    taken = dtype if device == "cuda" else torch.promote_types(dtype, torch.float32)
    q_BHTD = [part.transpose(1, 2).to(taken) * scale for part in q_parts]
    batch, heads, n_queries, _ = q_BHTD[0].shape
    running: dict[int, _RunningSoftmax] = {}
    for keys in ranges:
        key_tiles, query_tiles = _tiles(keys, batch, heads, n_queries, dtype == taken, device)
        for part in key_tiles:
            # One tile for a part that is both key and value. In a comprehension, a compiler would fix the range.
            tiles: dict[int, Tensor] = {}
            for x in (*keys.k, *keys.v):
                tiles[id(x)] = _made(x, part).transpose(1, 2).to(taken)
            for rows in query_tiles:
                seen = context.visible_tile(n_queries, rows, keys.index, part, keys.window)
                if seen is False:
                    continue
                products = (_scores(q[:, :, rows], tiles[id(k)]) for q, k in zip(q_BHTD, keys.k, strict=True))
                scores = functools.reduce(Tensor.add_, products)
                if seen is not True:
                    scores.masked_fill_(~seen, -torch.inf)
                running.setdefault(rows.start, _RunningSoftmax()).add(scores, [tiles[id(v)] for v in keys.v])
            # Before the next tile is made.
            tiles.clear()
    outs = [softmax.result() for softmax in running.values()]
    parts = [torch.cat(part, dim=2).to(dtype).transpose(1, 2) for part in zip(*outs, strict=True)]
    return parts if len(parts) == len(widths) else list(parts[0].split(widths, dim=-1))


def _by_few(q_parts: Sequence[Tensor], ranges: Sequence[KeyRange], context: Context, scale: float) -> Tensor | None:
    """By the compiled function, (B, T, H, sum of V_j); None where it cannot."""
    keys = ranges[0]
    k = [part for part in keys.k if isinstance(part, Tensor)]
    v = [part for part in keys.v if isinstance(part, Tensor)]
    if (
        len(ranges) > 1
        or len(k) < len(keys.k)
        or len(v) < len(keys.v)
        or not native.takes(_rows(q_parts[0], k, v), k, v)
    ):
        return None
    n_queries = q_parts[0].shape[1]
    seen = context.visible_tile(n_queries, slice(0, n_queries), keys.index, slice(0, len(keys.index)), keys.window)
    mask = None if isinstance(seen, bool) else seen
    q_BTHD = torch.cat(tuple(q_parts), dim=-1) if len(q_parts) > 1 else q_parts[0]
    return native.attend_few(q_BTHD, k, v, mask, scale)


def _rows(q_BTHD: Tensor, k: Sequence[Tensor], v: Sequence[Tensor]) -> int:
    """Queries that share a head of keys and values."""
    return q_BTHD.shape[1] * q_BTHD.shape[2] // max(part.shape[2] for part in (*k, *v))


class _RunningSoftmax:
    """The softmax of one tile of queries over the keys so far, with the sums of values that it weighs."""

    def __init__(self) -> None:
        self.peak: Tensor | None = None
        self.total: Tensor
        self.sums: list[Tensor]

    def add(self, scores_BHTS: Tensor, values: Sequence[Tensor]) -> None:
        """More keys, whose scores are overwritten, and their values (B, G, S, V_j)."""
        top = scores_BHTS.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(scores_BHTS.dtype).min)
        if self.peak is not None:
            top = torch.maximum(top, self.peak)
        shares = scores_BHTS.sub_(top).exp_()
        total, sums = shares.sum(dim=-1, keepdim=True), [_weighted(shares, v) for v in values]
        if self.peak is not None:
            fade = (self.peak - top).exp_()
            total += self.total * fade
            for new, old in zip(sums, self.sums, strict=True):
                new.addcmul_(old, fade)
        self.peak, self.total, self.sums = top, total, sums

    def result(self) -> list[Tensor]:
        """(B, H, T, V_j) for each part of the values."""
        total = self.total.clamp(min=torch.finfo(self.total.dtype).tiny)
        return [part / total for part in self.sums]


def _tiles(
    keys: KeyRange, batch: int, heads: int, n_queries: int, as_stored: bool, device: str
) -> tuple[Sequence[slice], Sequence[slice]]:
    """Ranges of keys and of queries."""
    n_keys = len(keys.index)
    if torch.compiler.is_compiling():
        # One tile, since a longer history must not compile anew: what is made for it exists whole, for one layer.
        return [slice(0, n_keys)], [slice(0, n_queries)]
    key_tile = _key_tile(keys, batch * heads * min(n_queries, QUERY_ROWS), batch, as_stored, device)
    query_tile = max(1, _tile_elements(device) // (batch * heads * key_tile))
    return _slices(n_keys, key_tile), _slices(n_queries, query_tile)


def _key_tile(keys: KeyRange, scores_per_key: int, batch: int, as_stored: bool, device: str) -> int:
    """Keys of a tile, by the largest of what it holds: scores, or entries that are made or converted for it."""
    widths = {
        id(part): math.prod(_shape(part)) for part in (*keys.k, *keys.v) if isinstance(part, Rebuilt) or not as_stored
    }
    fitting = _tile_elements(device) // max(scores_per_key, batch * sum(widths.values()))
    return max(FEWEST_KEYS, min(MOST_KEYS, fitting))


def _tile_elements(device: str) -> int:
    return CUDA_TILE_ELEMENTS if device == "cuda" else TILE_ELEMENTS


def _slices(length: int, size: int) -> Sequence[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _shape(part: Part) -> tuple[int, int]:
    """Heads, and features of each."""
    return (part.heads, part.dim) if isinstance(part, Rebuilt) else (part.shape[2], part.shape[3])


def _joined(keys: KeyRange) -> KeyRange:
    """Each side as one part, which is joined a tile at a time."""
    heads = max(_shape(part)[0] for part in (*keys.k, *keys.v))

    def join(parts: Sequence[Part]) -> Part:
        if len(parts) == 1:
            return parts[0]

        def make(tokens: slice) -> Tensor:
            tiles = (_made(part, tokens) for part in parts)
            return torch.cat([tile.repeat_interleave(heads // tile.shape[2], dim=2) for tile in tiles], dim=-1)

        return Rebuilt(heads, sum(_shape(part)[1] for part in parts), make)

    return KeyRange([join(keys.k)], [join(keys.v)], keys.index, keys.window)


def _made(part: Part, tokens: slice) -> Tensor:
    return part.make(tokens) if isinstance(part, Rebuilt) else part[:, tokens]


def _scores(q_BHTD: Tensor, k_BGSD: Tensor) -> Tensor:
    """(B, H, T, S), in float32 or wider."""
    batch, heads, n_queries, dim = q_BHTD.shape
    q = q_BHTD.reshape(batch * k_BGSD.shape[1], -1, dim)
    k = k_BGSD.flatten(0, 1)
    # Few rows: fastest with the long side first.
    scores = _product(k, q.mT).mT if q.shape[1] <= 16 else _product(q, k.mT)
    return scores.reshape(batch, heads, n_queries, -1)


def _weighted(shares_BHTS: Tensor, v_BGSV: Tensor) -> Tensor:
    """(B, H, T, V), in float32 or wider."""
    batch, heads, n_queries, n_keys = shares_BHTS.shape
    shares = shares_BHTS.reshape(batch * v_BGSV.shape[1], -1, n_keys).to(v_BGSV.dtype)
    return _product(shares, v_BGSV.flatten(0, 1)).reshape(batch, heads, n_queries, -1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and a.dtype.itemsize < 4:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b)
