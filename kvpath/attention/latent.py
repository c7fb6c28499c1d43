"""The product over keys and values that are made from a stored latent, without ever expanding the latent whole."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpath.attention.context import Context, History
from kvpath.attention.strategy import split_heads
from kvpath.attention.tiles import KeyRange, Part, Rebuilt, attend_in_tiles


def attend_latent(
    q_parts: Sequence[Tensor],
    latent: History,
    w_up: Tensor,
    gain: Tensor | None,
    k_beside: Sequence[History],
    v_beside: Sequence[History],
    context: Context,
) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V with K = [W_k (gain * c) || k_beside] and V = [W_v (gain * c) || v_beside].

    Few queries meet the latent itself: W_k and the gain go to the query, the gain and W_v to the sum, so no weights
    are derived. With many queries a tile of the latent is expanded at a time, once for all of them.

    Args:
        q_parts: (B, T, H, D) for what comes from the latent, then one for each of `k_beside`.
        latent: c, (B, S, 1, L).
        w_up: (2 * H * D, L): W_k of all heads, then W_v.
        gain: (L,); None for ones.
        k_beside: keys that are stored as they are, over the same tokens.
        v_beside: values that are.
        context: positions, visibility.

    Returns:
        (B, T, H * V), each head's V being D and the widths of `v_beside`.
    """
    q_BTHD, *q_beside = q_parts
    n_queries, n_heads, dim = q_BTHD.shape[1:]
    n_latent = w_up.shape[1]
    w_k, w_v = w_up.view(2, n_heads, dim, n_latent)
    # Absorbed, each query and key cost 2 H (L - D) multiply-adds more, and each key 2 H D L less.
    absorbed = n_queries * (n_latent - dim) <= dim * n_latent
    k: Part = latent.values
    v: Part = latent.values
    if absorbed:
        q_BTHD = _scaled(torch.einsum("bthd,hdl->bthl", q_BTHD, w_k), gain)
    else:
        k, v = _expanded(latent.values, w_k, gain), _expanded(latent.values, w_v, gain)
    keys = KeyRange(
        [k, *(part.values for part in k_beside)], [v, *(part.values for part in v_beside)], latent.index, latent.window
    )
    scale = 1 / math.sqrt(sum(part.shape[-1] for part in q_parts))
    out, *beside = attend_in_tiles([q_BTHD, *q_beside], [keys], context, scale)
    if absorbed:
        out = torch.einsum("bthl,hdl->bthd", _scaled(out, gain), w_v)
    return torch.cat((out, *beside), dim=-1).flatten(2)


def _expanded(latent_BS1L: Tensor, w_HDL: Tensor, gain: Tensor | None) -> Rebuilt:
    n_heads, dim, _ = w_HDL.shape
    w = w_HDL.flatten(0, 1)

    def make(tokens: slice) -> Tensor:
        return split_heads(F.linear(_scaled(latent_BS1L[:, tokens, 0], gain), w), n_heads)

    return Rebuilt(n_heads, dim, make)


def _scaled(x: Tensor, gain: Tensor | None) -> Tensor:
    return x if gain is None else x * gain.to(x.dtype)
