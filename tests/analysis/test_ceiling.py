"""The ceiling holds every product of a training step, and no others."""

import pytest
import torch
from torch import Tensor

from kvpath.analysis.audit import on_meta, weight_flops
from kvpath.analysis.ceiling import ATTENTION, Call, Like, bare_loop, record_products
from tests.cases import SHIPPED, Case, tokens

LENGTH = 11


def recorded(case: Case) -> list[Call]:
    """One training step of a toy model in float32."""
    model, tokens_BT = case.decoder(torch.float32), tokens(1, LENGTH)
    return record_products(lambda: model(tokens_BT, tokens_BT).total.backward())


# Deltas of one feature are expanded element by element.
@pytest.mark.parametrize("case", [case for case in SHIPPED if case.name != "residual-one"], ids=str)
def test_a_training_step_multiplies_no_matrix_more_often_than_it_must(case: Case) -> None:
    """Three products for each that the audit counts: forward, and the gradients of both sides."""
    assert sum(call.flops for call in recorded(case)) == 3 * LENGTH * weight_flops(on_meta(case.config()))


@pytest.mark.parametrize("case", SHIPPED, ids=str)
def test_every_layer_runs_the_fused_attention_forward_and_backward(case: Case) -> None:
    names = [call.name.removesuffix(".default") for call in recorded(case) if call.name.startswith(ATTENTION)]
    forward = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert names == [forward] * case.n_layers + [f"{forward}_backward"] * case.n_layers


def test_looks_are_kept() -> None:
    left, right = torch.ones(5, 3).T, torch.ones(5, 7)
    (call,) = record_products(lambda: left @ right)
    assert call.arguments == (
        Like(left.shape, (1, 3), torch.float32, left.device),
        Like(right.shape, (7, 1), torch.float32, left.device),
    )
    assert call.flops == 2 * 3 * 5 * 7


def test_the_bare_loop_makes_the_same_calls_and_no_others() -> None:
    calls = recorded(SHIPPED[1])
    loop = bare_loop(calls)
    assert record_products(loop) == calls
    with torch.profiler.profile() as profile:
        loop()
    ran = {entry.key: entry.count for entry in profile.key_averages()}
    assert not set(ran) & {"aten::copy_", "aten::add", "aten::mul", "aten::exp"}


def test_an_attention_without_a_fused_kernel_is_seen() -> None:
    query, mask = torch.randn(1, 2, 4, 8, requires_grad=True), torch.zeros(4, 4, requires_grad=True)

    def step() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)

    names = {call.name.removesuffix(".default") for call in record_products(step)}
    assert names == {"aten::bmm"}
