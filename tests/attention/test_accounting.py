from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from kvpath.attention import Context, Heads, LayerLayout, Layout, Read, Slot
from kvpath.attention.accounting import (
    attention_flops,
    key_windows,
    measured_flops,
    per_token,
    read_elements,
    stated_flops,
    stored_elements,
    visible_keys,
    visible_pairs,
)
from kvpath.attention.gqa import GQA
from kvpath.attention.product import Segment, attend
from kvpath.attention.strategy import Backbone
from tests.analysis.models import ATTENTION, paper
from tests.attention.strategies import LocalHistory, Made
from tests.cases import D_MODEL, Case

HEADS = Heads(2, 4, 4)


@pytest.mark.parametrize(
    ("name", "stored", "read"),
    [
        ("mha", 12_288, 12_288),
        ("gqa", 6_144, 6_144),
        ("mqa", 1_536, 1_536),
        ("mqa_wide", 6_144, 6_144),
        ("cla", 6_144, 24_576),
        ("concat", 6_144, 15_360),
        ("residual", 6_144, 19_968),
        ("rolling", 6_144, 15_360),
        ("mla", 1_920, 1_920),
        ("kvpath_mla", 1_920, 5_376),
    ],
)
def test_elements_of_the_paper(name: str, stored: int, read: int) -> None:
    layout = paper(ATTENTION[name]).layout()
    for context in (None, 1, 2048):
        assert (stored_elements(layout, context), read_elements(layout, context)) == (stored, read)


def local_over_global() -> Layout:
    """A global slot of 6 elements that two layers read, and a window of 4 tokens of 10 elements in the upper one."""
    lower = LayerLayout({"k": Slot(2, 3)}, (), HEADS)
    upper = LayerLayout({"k_local": Slot(2, 5, window=4)}, (Read(0, "k", columns=(1, 3)),), HEADS)
    return Layout((lower, upper))


@pytest.mark.parametrize(
    ("context", "stored", "read"),
    [
        (None, 16, 6 + 10 + 4),
        (4, 16, 6 + 10 + 4),
        (8, (8 * 6 + 4 * 10) / 8, (8 * 6 + 4 * 10 + 8 * 4) / 8),
        (9, (9 * 6 + 4 * 10) / 9, (9 * 6 + 4 * 10 + 9 * 4) / 9),
    ],
)
def test_a_window_is_averaged_over_the_context(context: int | None, stored: float, read: float) -> None:
    layout = local_over_global()
    assert (stored_elements(layout, context), read_elements(layout, context)) == (stored, read)


def test_what_is_not_stored_costs_no_memory_and_stands_for_its_parts() -> None:
    state = Slot(1, 8, cached=False)
    layers = (
        LayerLayout({"k": Slot(1, 8)}, (), HEADS),
        LayerLayout({"delta": Slot(1, 2), "state": state}, (Read(0, "k"),), HEADS),
        LayerLayout({"delta": Slot(1, 2)}, (Read(1, "state"),), HEADS),
    )
    assert stored_elements(Layout(layers)) == 8 + 2 + 2
    assert read_elements(Layout(layers)) == 8 + (8 + 2) + (8 + 2 + 2)


def test_exact_counts_are_integers() -> None:
    assert isinstance(stored_elements(local_over_global(), 8), int)
    assert isinstance(stored_elements(local_over_global(), 9), float)
    assert (per_token(6, 3), per_token(7, 2)) == (2, 3.5)


def test_global_and_local_keys_stand_in_one_softmax() -> None:
    attention = LocalHistory(n_heads=4, n_kv_heads=2, head_dim=6, window=3, middle=1, share=2, d_source=D_MODEL)
    layout = Case("", attention, n_layers=4).config().layout()
    assert key_windows(layout, 0) == (None,)
    # Layer 2 also reads a source hidden state, which is no key.
    for layer in (1, 2, 3):
        assert set(key_windows(layout, layer)) == {None, 3}
        assert [visible_keys(layout, layer, context) for context in (1, 3, 8)] == [2, 6, 11]


@pytest.mark.parametrize("seq_len", [1, 3, 4, 5, 11])
def test_visible_pairs_are_those_of_the_mask(seq_len: int) -> None:
    layout = local_over_global()
    distance = torch.arange(seq_len)[:, None] - torch.arange(seq_len)
    causal = int((distance >= 0).sum())
    local = int(((distance >= 0) & (distance < 4)).sum())
    assert visible_pairs(layout, 0, seq_len) == causal
    assert visible_pairs(layout, 1, seq_len) == causal + local
    assert visible_pairs(layout, 1, seq_len, causal=False) == 2 * seq_len**2


class States(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 5))
        self.inner = nn.Linear(100, 100)

    def matmul_flops_per_token(self) -> int:
        return 30


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 5))


@pytest.mark.parametrize(
    ("module", "flops"),
    [
        (nn.Linear(3, 5), 30),
        (nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Sequential(nn.Linear(5, 2, bias=False))), 50),
        (nn.Embedding(7, 5), 0),
        (nn.Sequential(States(), nn.Linear(3, 5)), 60),
        (nn.Sequential(nn.Linear(3, 5), Silent()), None),
        (nn.ParameterList([torch.empty(3, 5)]), None),
    ],
)
def test_flops_from_modules(module: nn.Module, flops: int | None) -> None:
    assert stated_flops(module) == flops


@dataclass(kw_only=True)
class BareMatrices(GQA):
    """Its matrices are in no linear layer, and it says nothing of their arithmetic."""

    def makes(self, layer: int) -> Mapping[str, Slot]:
        return super().makes(layer) if layer == 0 else {}

    def reads(self, layer: int) -> tuple[Read, ...]:
        return (Read(0, "k"), Read(0, "v")) if layer else ()

    def build(self, layer: int, backbone: Backbone) -> nn.Module:
        return BareAttention(self, backbone) if layer else super().build(layer, backbone)


class BareAttention(nn.Module):
    def __init__(self, strategy: GQA, backbone: Backbone) -> None:
        super().__init__()
        self.n_heads = strategy.n_heads
        self.w_q = nn.Parameter(torch.empty(strategy.n_heads, backbone.d_model, strategy.head_dim))
        self.w_o = nn.Parameter(torch.empty(strategy.n_heads * strategy.head_dim, backbone.d_model))

    def forward(self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context) -> Made:
        k, v = context.received(read)
        q_BTHD = context.rotate(torch.einsum("btc,hcd->bthd", x_BTC, self.w_q))
        return attend([q_BTHD], [Segment(k=(k,), v=(v,))], context) @ self.w_o, ()


class HandwrittenProduct(BareAttention):
    def forward(self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context) -> Made:
        k, v = (torch.repeat_interleave(x, 2, dim=2).transpose(1, 2) for x in read)
        q_BHTD = torch.einsum("btc,hcd->bhtd", x_BTC, self.w_q)
        out_BHTD = (q_BHTD @ k.transpose(2, 3)).softmax(-1) @ v
        return out_BHTD.transpose(1, 2).flatten(2) @ self.w_o, ()


@pytest.mark.parametrize("kind", [BareAttention, HandwrittenProduct])
def test_matrices_that_nobody_states_are_measured_without_the_product(kind: type[BareAttention]) -> None:
    case = Case("bare", BareMatrices(n_heads=4, n_kv_heads=2, head_dim=6))
    config = case.config()
    with torch.device("meta"):
        module = kind(case.attention, config)  # type: ignore[arg-type]
    assert stated_flops(module) is None
    assert attention_flops(module, config.layout(), 1, D_MODEL) == 2 * (D_MODEL * 24 + 24 * D_MODEL)


def test_measuring_keeps_what_grows_with_tokens() -> None:
    x = torch.empty(64, 3, device="meta")
    weight = torch.empty(3, 5, device="meta")

    def run(tokens: int) -> None:
        part = x[:tokens]
        (part @ part.T) @ (part @ weight)

    assert measured_flops(run) == 2 * 3 * 5


@pytest.mark.parametrize(
    ("name", "layer", "flops"),
    [
        ("gqa", 0, 2 * 8 * (64 + 64) * 100),
        ("concat", 0, 2 * 8 * (160 + 160) * 100),
        # Absorbed: scores over latent and rotary key, sums over the latent.
        ("mla", 0, 2 * 8 * ((128 + 32) + 128) * 100),
        ("kvpath_mla", 1, 2 * 8 * ((384 + 32) + (384 + 32)) * 100),
        ("residual", 4, 2 * 8 * (160 + 160) * 100),
        # U_K and U_V for the 99 tokens before.
        ("residual", 5, 2 * 8 * (160 + 160) * 100 + 2 * 2 * 4 * 160 * 32 * 99),
    ],
)
def test_decoding_over_stored_keys(name: str, layer: int, flops: int) -> None:
    assert ATTENTION[name].decode_flops(layer, n_keys=100) == flops
