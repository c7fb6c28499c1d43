"""The attention product, one function for every layout."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpath.attention.context import Context, History

MASK_ELEMENTS = 2**22
"""What a mask holds in a pass with a store: beyond it, queries go in tiles."""


@dataclass(frozen=True)
class Segment:
    """A range of keys and values: parts over features, which share one window and the positions of the first."""

    k: tuple[History, ...]
    v: tuple[History, ...]


Product = Callable[[Sequence[Tensor], Sequence[Segment], Context], Tensor]
"""`attend`, or another way to what it gives."""


def attend(q_parts: Sequence[Tensor], segments: Sequence[Segment], context: Context) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V over all segments in one softmax.

    Args:
        q_parts: each (B, T, H, D_i): parts over features that meet the parts of each segment's keys.
        segments: key parts (B, S, G_i, D_i) and value parts (B, S, G_i, V_i); a part with fewer heads is shared by
            the others' heads, and H must be a multiple of the largest G.
        context: positions, visibility.

    Returns:
        (B, T, H * V). A query that sees no key gives zeros.
    """
    q_BHTD = torch.cat(tuple(q_parts), dim=-1).transpose(1, 2) if len(q_parts) > 1 else q_parts[0].transpose(1, 2)
    heads = max(part.values.shape[2] for segment in segments for part in (*segment.k, *segment.v))
    keys = [_join(segment.k, heads) for segment in segments]
    values = [_join(segment.v, heads) for segment in segments]
    k_BGSD = (torch.cat(keys, dim=1) if len(keys) > 1 else keys[0]).transpose(1, 2)
    v_BGSV = (torch.cat(values, dim=1) if len(values) > 1 else values[0]).transpose(1, 2)
    n_queries = q_BHTD.shape[2]
    most_rows = max(1, MASK_ELEMENTS // (q_BHTD.shape[0] * k_BGSD.shape[2]))
    if context.store is None or n_queries <= most_rows or _only_causal(n_queries, segments):
        out_BHTV = _product(q_BHTD, k_BGSD, v_BGSV, *_visibility(n_queries, segments, context))
    else:
        tiles = [slice(start, min(start + most_rows, n_queries)) for start in range(0, n_queries, most_rows)]
        outs = [
            _product(q_BHTD[:, :, rows], k_BGSD, v_BGSV, _mask_of(rows, n_queries, segments, context), False)
            for rows in tiles
        ]
        out_BHTV = torch.cat(outs, dim=2)
    return out_BHTV.transpose(1, 2).flatten(2)


def _join(parts: tuple[History, ...], heads: int) -> Tensor:
    """Parts over features, (B, S, G_i, D_i), as one (B, S, heads, sum of D_i)."""
    spread = [_share(part.values, heads) for part in parts]
    return torch.cat(spread, dim=-1) if len(spread) > 1 else spread[0]


def _share(x_BSGD: Tensor, heads: int) -> Tensor:
    """Each head as often as makes `heads` of them; a single head is not copied."""
    return x_BSGD.unsqueeze(3).expand(-1, -1, -1, heads // x_BSGD.shape[2], -1).flatten(2, 3)


def _visibility(n_queries: int, segments: Sequence[Segment], context: Context) -> tuple[Tensor | None, bool]:
    first = [segment.k[0] for segment in segments]
    if len(first) == 1:
        return context.visibility(n_queries, first[0].index, first[0].window)
    masks = []
    for keys in first:
        mask, causal = context.visibility(n_queries, keys.index, keys.window)
        if mask is None:
            mask = torch.ones(1, 1, n_queries, len(keys.index), dtype=torch.bool, device=keys.values.device)
            mask = mask.tril() if causal else mask
        masks.append(mask)
    batch = max(mask.shape[0] for mask in masks)
    return torch.cat([mask.expand(batch, -1, -1, -1) for mask in masks], dim=-1), False


def _only_causal(n_queries: int, segments: Sequence[Segment]) -> bool:
    """Whether a kernel knows what is visible without a mask."""
    keys = segments[0].k[0]
    return len(segments) == 1 and keys.window is None and keys.index.plain and len(keys.index) == n_queries


def _mask_of(rows: slice, n_queries: int, segments: Sequence[Segment], context: Context) -> Tensor:
    """What some rows of the last `n_queries` new tokens see of all segments, (B, 1, t, S)."""
    masks = []
    for keys in (segment.k[0] for segment in segments):
        n_keys = len(keys.index)
        seen = context.visible_tile(n_queries, rows, keys.index, slice(0, n_keys), keys.window)
        if isinstance(seen, bool):
            shape = (1, 1, rows.stop - rows.start, n_keys)
            seen = torch.full(shape, seen, dtype=torch.bool, device=keys.values.device)
        masks.append(seen)
    batch = max(mask.shape[0] for mask in masks)
    return torch.cat([mask.expand(batch, -1, -1, -1) for mask in masks], dim=-1)


def _product(q_BHTD: Tensor, k_BGSD: Tensor, v_BGSV: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    scale = 1.0 / math.sqrt(q_BHTD.shape[-1])
    v_dim = v_BGSV.shape[-1]
    # Fused kernels want one width for keys and values; zeros change neither scores nor sums.
    width = max(q_BHTD.shape[-1], v_dim)
    q_BHTD, k_BGSD, v_BGSV = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
                              for x in (q_BHTD, k_BGSD, v_BGSV))  # fmt: skip
    blind = None
    if mask is not None:
        # A row that sees nothing would be NaN: let it see everything, then drop its output and gradient.
        blind = ~mask.any(dim=-1, keepdim=True)
        mask = mask | blind
    n_heads, n_queries, groups = q_BHTD.shape[1], q_BHTD.shape[2], k_BGSD.shape[1]
    if n_heads != groups and not _kernel_shares_heads(q_BHTD, mask):
        if n_queries == 1:
            q_BHTD = q_BHTD.reshape(-1, groups, n_heads // groups, width)  # heads as queries: what one sees, all see
        else:
            k_BGSD, v_BGSV = (x.repeat_interleave(n_heads // groups, dim=1) for x in (k_BGSD, v_BGSV))
    out_BHTV = F.scaled_dot_product_attention(
        q_BHTD,
        k_BGSD,
        v_BGSV,
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=q_BHTD.shape[1] != k_BGSD.shape[1],
    ).reshape(-1, n_heads, n_queries, width)
    out_BHTV = out_BHTV[..., :v_dim]
    return out_BHTV if blind is None else out_BHTV.masked_fill(blind, 0.0)


def _kernel_shares_heads(q_BHTD: Tensor, mask: Tensor | None) -> bool:
    """Whether torch has a fused kernel for heads that share keys; on GPUs none takes a mask too, at every width."""
    return mask is None or not q_BHTD.is_cuda
