import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kvpath.analysis.audit import (
    Audit,
    audit,
    decode_flops,
    forward_flops,
    on_meta,
    parameters_by_part,
    sequences_that_fit,
    weight_flops,
)
from kvpath.analysis.tables import Cell, as_csv, format_audits, table, widths_text
from kvpath.attention.accounting import key_windows
from kvpath.errors import UserError
from kvpath.model import BackboneConfig
from tests.analysis.models import ATTENTION, paper
from tests.cases import CASES, Case, every_case

EMBEDDING = 50_304 * 512
GQA_ATTENTION = 12 * (512 * 512 + 2 * 512 * 256 + 512 * 512)
MLA_ATTENTION = 12 * (512 * 768 + 512 * (128 + 32) + 128 * 1024 + 512 * 512)
MLP = 12 * 3 * 512 * 2048


def gqa(**changes: object) -> BackboneConfig:
    return paper(ATTENTION["gqa"], 2048, **changes)


def test_gqa_by_hand() -> None:
    found = audit(gqa(), context=2048, name="gqa")
    weights = 2 * (GQA_ATTENTION + MLP + EMBEDDING)
    forward = weights + 12 * 2 * 8 * 128 * 2049 / 2
    assert found == Audit(
        name="gqa",
        context=2048,
        dtype="bfloat16",
        d_ff=(2048,) * 12,
        parameters=98_710_016,
        parameters_by_part={
            "embedding": EMBEDDING,
            "head": EMBEDDING,
            "attention": GQA_ATTENTION,
            "mlp": MLP,
            "norms": 25 * 512,
        },
        stored_elements_per_token=6_144,
        read_elements_per_token=6_144,
        stored_bytes_per_token=12_288,
        allocated_bytes_per_token=12_288 + 8,
        compact_bytes=0,
        step_bytes=found.step_bytes,
        plain_step_bytes=found.step_bytes,
        forward_flops_per_token=forward,
        training_flops_per_token=3 * forward,
        decode_flops_per_token=weights + 12 * 2 * 8 * 128 * 2048,
    )


def test_mla_by_hand() -> None:
    found = audit(paper(ATTENTION["mla"], 2048), context=2048)
    weights = 2 * (MLA_ATTENTION + MLP + EMBEDDING)
    assert found.parameters == 99_694_592
    assert found.parameters_by_part["norms"] == 25 * 512 + 12 * 128
    assert found.forward_flops_per_token == weights + 12 * 2 * 8 * (96 + 64) * 2049 / 2
    assert found.decode_flops_per_token == weights + 12 * 2 * 8 * (160 + 128) * 2048


def test_residual_spends_its_decoding_on_rebuilding() -> None:
    model = on_meta(paper(ATTENTION["residual"], 1516))
    steps = [decode_flops(model, context) for context in (1000, 2000)]
    products = 12 * 2 * 8 * 320
    assert steps[1] - steps[0] == 1000 * (737_280 + products)


def test_a_tied_head_counts_for_flops_and_not_for_parameters() -> None:
    tied, free = (audit(gqa(tied_embeddings=tied)) for tied in (True, False))
    assert free.parameters - tied.parameters == EMBEDDING
    assert (tied.parameters_by_part["head"], tied.parameters_by_part["embedding"]) == (0, EMBEDDING)
    assert tied.forward_flops_per_token == free.forward_flops_per_token


@every_case
def test_parts_sum_to_the_model(case: Case) -> None:
    model = on_meta(case.config())
    assert sum(parameters_by_part(model).values()) == sum(parameter.numel() for parameter in model.parameters())


# A contraction over a single feature is no matrix product to torch.
@pytest.mark.parametrize("case", [case for case in CASES if getattr(case.attention, "delta_dim", 2) > 1], ids=str)
def test_forward_flops_are_those_that_torch_counts(case: Case) -> None:
    seq_len = 11
    model = on_meta(case.config())
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, seq_len, dtype=torch.int64, device="meta"))
    # The product pads the narrower of keys and values with zeros, which the convention does not count.
    padding = 0
    for layer, entry in enumerate(model.layout.layers):
        heads, n_keys = entry.heads, len(key_windows(model.layout, layer)) * seq_len
        padding += 2 * heads.n_heads * abs(heads.qk_dim - heads.v_dim) * n_keys * seq_len
    counted = forward_flops(model, seq_len, causal=False) * seq_len + padding
    assert counted == counter.get_total_flops()


@every_case
def test_decoding_meets_every_weight_and_every_visible_key(case: Case) -> None:
    model = on_meta(case.config())
    first, second = decode_flops(model, 1), decode_flops(model, 2)
    assert weight_flops(model) < first < second


def test_the_context_is_the_longest_trained_on_unless_given() -> None:
    assert audit(gqa(max_seq_len=300)).context == 300
    assert audit(gqa(max_seq_len=300), context=7).context == 7


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("float16", 2), ("float64", 8)])
def test_bytes_follow_the_dtype(dtype: str, width: int) -> None:
    found = audit(gqa(), dtype=dtype)
    assert found.stored_bytes_per_token == 6_144 * width
    assert found.weight_bytes == 98_710_016 * width


def test_bad_options_are_named_together() -> None:
    with pytest.raises(UserError, match=r"context must be positive, got 0; dtype must be one of .*, got 'int7'"):
        audit(gqa(), context=0, dtype="int7")


def test_sequences_fit_beside_the_weights() -> None:
    found = audit(gqa(), context=2048)
    one = 2048 * 12_288
    assert sequences_that_fit(found, found.weight_bytes + 3 * one) == 3
    assert sequences_that_fit(found, found.weight_bytes + 3 * one - 1) == 2
    with pytest.raises(UserError, match=r"memory must hold the weights of GQA, 197,420,032 bytes, got 1,000 bytes"):
        sequences_that_fit(found, 1000)


def test_a_table_is_aligned() -> None:
    rows: list[dict[str, Cell]] = [{"name": "a", "count": 1234}, {"name": "long", "count": 0.25}]
    assert table(rows).splitlines() == ["name  count", "----  -----", "a     1,234", "long    0.2"]
    assert table([]) == ""


def test_csv_keeps_every_digit() -> None:
    assert as_csv([{"name": "a, b", "count": 1234.5678}]) == 'name,count\n"a, b",1234.5678'


def test_widths_in_short() -> None:
    assert widths_text([7, 7, 7]) == "7"
    assert widths_text([8, 7, 7]) == "8 x 1, 7 x 2"


def test_every_format_holds_the_same_numbers() -> None:
    found = audit(replace(gqa(), d_ff=[64] * 11 + [63]), name="toy")
    (read,) = json.loads(format_audits([found], "json", [{"fits": 5}]))
    assert (read["name"], read["forward_flops_per_token"], read["fits"]) == ("toy", found.forward_flops_per_token, 5)
    header, line = format_audits([found], "csv").splitlines()
    assert "parameters_attention" in header.split(",")
    assert f"{found.parameters},{EMBEDDING},{EMBEDDING},{GQA_ATTENTION}," in line
    text = format_audits([found], "table")
    assert f"{found.parameters:,}" in text
    assert "a multiply-add is 2" in text
