"""Slow and obvious: the model from its equations, one query and one key at a time, for tests to compare with.

Only the rotary angles are the model's own (float32, and tested by themselves).
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.testing import assert_close

from kvpath.attention.rotary import rotary_angles
from kvpath.model import IGNORE, BackboneConfig
from tests.cases import Case, tokens

Weights = Mapping[str, Tensor]

Weight = Callable[[str], Tensor]
"""A weight of one layer's attention, by its name in the module."""

Attention = Callable[[int, Tensor, Weight], Tensor]
"""(layer, residual stream (T, C), weights) -> update of the residual stream (T, C)"""

EPS = 1e-5
BASE = 1e6


def sees(query: int, key: int, window: int | None = None) -> bool:
    """Whether the token at position `query` sees the one at `key`; a window counts the current token."""
    return key <= query and (window is None or query - key < window)


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * gain


def rope(x_THD: Tensor) -> Tensor:
    """Features i and i + D/2 of the token at position t turn by the angle t / base^(2i/D)."""
    n_tokens, _, dim = x_THD.shape
    cos_T1F, sin_T1F = (part[0].double() for part in rotary_angles(torch.arange(n_tokens)[None], dim, BASE))
    columns: list[Tensor] = [torch.empty(0)] * dim
    for i in range(dim // 2):
        a, b = x_THD[:, :, i], x_THD[:, :, i + dim // 2]
        columns[i] = a * cos_T1F[:, :, i] - b * sin_T1F[:, :, i]
        columns[i + dim // 2] = a * sin_T1F[:, :, i] + b * cos_T1F[:, :, i]
    return torch.stack(columns, dim=-1)


def attention(q_THD: Tensor, k_SGD: Tensor, v_SGV: Tensor, visible: Callable[[int, int], bool] = sees) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, (T, H * V); query head h is served by key/value head h // (H / G)."""
    n_queries, n_heads, dim = q_THD.shape
    n_kv_heads = k_SGD.shape[1]
    rows = []
    for t in range(n_queries):
        heads = []
        for h in range(n_heads):
            g = h // (n_heads // n_kv_heads)
            keys = [s for s in range(len(k_SGD)) if visible(t, s)]
            if not keys:
                heads.append(torch.zeros_like(v_SGV[0, g]))
                continue
            scores = torch.stack([q_THD[t, h] @ k_SGD[s, g] / math.sqrt(dim) for s in keys])
            shares = scores.exp() / scores.exp().sum()
            heads.append(sum((share * v_SGV[s, g] for share, s in zip(shares, keys, strict=True)), torch.tensor(0.0)))
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def heads(x_TC: Tensor, n_heads: int) -> Tensor:
    """(T, H * D) as (T, H, D): head h has the h-th run of D columns."""
    return torch.stack(x_TC.split(x_TC.shape[1] // n_heads, dim=1), dim=1)


def decoder(weights: Weights, config: BackboneConfig, tokens_T: Tensor, attend: Attention) -> Tensor:
    """Logits (T, V) of one sequence."""
    x = weights["embedding.weight"][tokens_T]
    for layer in range(config.n_layers):
        own = f"blocks.{layer}."
        x = x + attend(layer, x, lambda name, own=own: weights[f"{own}attention.{name}.weight"])  # type: ignore[misc]
        h = rms_norm(x, weights[own + "norm.weight"])
        gate = h @ weights[own + "mlp.w_gate.weight"].T
        up = h @ weights[own + "mlp.w_up.weight"].T
        x = x + (gate / (1 + (-gate).exp()) * up) @ weights[own + "mlp.w_down.weight"].T
    return rms_norm(x, weights["norm.weight"]) @ weights["head.weight"].T


def assert_equal_to_equations(case: Case, attention_of: Callable[[BackboneConfig], Attention]) -> None:
    """Logits, loss and the gradients of all parameters of a case equal those of the equations.

    Args:
        case: the strategy.
        attention_of: its equations; called for each sequence anew, so that it may keep what later layers read.
    """
    model = case.decoder()
    tokens_BT, labels_BT = tokens(2, 7), tokens(2, 7, seed=3)
    labels_BT[0, 2:4] = IGNORE
    logits = model(tokens_BT)
    sums = model(tokens_BT, labels_BT)
    sums.total.backward()

    weights = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    expected = torch.stack([decoder(weights, model.config, row, attention_of(model.config)) for row in tokens_BT])
    log_shares = expected - expected.exp().sum(-1, keepdim=True).log()
    scored = [-log_shares[b, t, labels_BT[b, t]] for b in range(2) for t in range(7) if int(labels_BT[b, t]) != IGNORE]
    loss = torch.stack(scored).sum()
    loss.backward()

    assert int(sums.count) == len(scored) == 12
    assert_close(logits, expected, atol=1e-10, rtol=0)
    assert_close(sums.total, loss, atol=1e-10, rtol=0)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, weights[name].grad, atol=1e-10, rtol=0, msg=name)
