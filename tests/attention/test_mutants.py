"""Faults put in by hand: the checks that must find them do."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from kvpath.attention import Context, Index, KVPathConcat, Layout, Read, product, rotary
from kvpath.attention import context as context_module
from kvpath.attention.prefill import PrefillPlan
from kvpath.errors import UserError
from kvpath.inference import Cache
from kvpath.model import Decoder, loss
from kvpath.model import decoder as decoder_module
from tests.attention.reference import assert_equal_to_equations
from tests.attention.test_gqa import equations as gqa_equations
from tests.attention.test_kvpath_concat import equations as concat_equations
from tests.attention.test_layout import contract_case
from tests.cases import SHIPPED, Case, tokens
from tests.parity import CLOSE, chunked, logits, packed, padded_chunks

Patch = pytest.MonkeyPatch


def shipped(name: str) -> Case:
    return next(case for case in SHIPPED if case.name == name)


def check_cache(case: Case) -> None:
    model, tokens_BT = case.decoder(), tokens(2, 11)
    assert_close(chunked(model, tokens_BT, [3, 1, 5]), logits(model, tokens_BT), **CLOSE)


def check_padding(case: Case) -> None:
    model, rows = case.decoder(), [tokens(length, seed=length) for length in (4, 11)]
    for row, found in zip(rows, padded_chunks(model, rows, [5, 6]), strict=True):
        assert_close(found, logits(model, row[None])[0], **CLOSE)


def check_documents(case: Case) -> None:
    model, documents = case.decoder(), [tokens(length, seed=length) for length in (5, 6)]
    tokens_1T, index = packed(documents)
    assert_close(logits(model, tokens_1T, index)[0, 5:], logits(model, documents[1][None])[0], **CLOSE)


@torch.no_grad()
def check_suffix(case: Case) -> None:
    model, tokens_BT = case.decoder(), tokens(2, 11)
    caches = [Cache(model.layout, 2, dtype=torch.float64) for _ in range(2)]
    assert_close(model(tokens_BT, store=caches[0], wanted=1), model(tokens_BT, store=caches[1])[:, -1:], **CLOSE)
    for owner, name, _ in model.layout.cached():
        assert_close(caches[0].entries(owner, name).values, caches[1].entries(owner, name).values, **CLOSE)


def check_checkpointing(case: Case) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = case.decoder()
        model.activation_checkpointing = checkpointing
        model(tokens(2, 7), tokens(2, 7, seed=3)).total.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert_close(gradients[1], gradients[0], **CLOSE)


def check_gqa(case: Case) -> None:
    assert_equal_to_equations(case, gqa_equations)


def check_concat(case: Case) -> None:
    assert_equal_to_equations(case, concat_equations)


def positions_shifted(patch: Patch) -> None:
    plain = Cache.place

    def place(self: Cache, tokens: Tensor, valid: Tensor | None = None) -> Index:
        index = plain(self, tokens, valid)
        return index if len(self) == 0 else Index(index.positions + 1, index.valid)

    patch.setattr(Cache, "place", place)


def padding_takes_positions(patch: Patch) -> None:
    def place(self: Cache, tokens: Tensor, valid: Tensor | None = None) -> Index:
        return Index(torch.arange(len(self), len(self) + tokens.shape[1]).expand(len(tokens), -1) // 2, valid)

    patch.setattr(Cache, "place", place)


def window_off_by_one(patch: Patch) -> None:
    plain = context_module.visible
    patch.setattr(context_module, "visible", lambda queries, keys, window: plain(queries, keys, window and window + 1))


def window_dropped_from_the_mask(patch: Patch) -> None:
    plain = Context.visibility
    patch.setattr(Context, "visibility", lambda self, n_queries, keys, window: plain(self, n_queries, keys, None))


def documents_ignored(patch: Patch) -> None:
    plain = context_module.visible
    patch.setattr(
        context_module,
        "visible",
        lambda queries, keys, window: plain(Index(queries.positions, queries.valid), keys, window),
    )


def aligned_at_the_top_left(patch: Patch) -> None:
    def visibility(self: Context, n_queries: int, keys: Index, window: int | None) -> tuple[Tensor, bool]:
        return torch.ones(1, 1, n_queries, len(keys), dtype=torch.bool).tril(), False

    patch.setattr(Context, "visibility", visibility)


def lengths_advance_after_the_first_layer(patch: Patch) -> None:
    plain = Context.at

    def at(self: Context, layer: int) -> Context:
        if layer and self.store is not None:
            new = Index(self.new.positions + len(self.new), self.new.valid)
            self = Context.of(self.layout, new, self.rotary_base, self.store, self.plan)
        return plain(self, layer)

    patch.setattr(Context, "at", at)


def alpha_of_another_path(patch: Patch) -> None:
    patch.setattr(KVPathConcat, "path_start", lambda self, layer: 0 if layer % self.path_length else layer)


def keys_of_another_head(patch: Patch) -> None:
    plain = Context.append

    def append(self: Context, name: str, new: Tensor) -> object:
        return plain(self, name, new.roll(1, dims=2) if name == "k_delta" else new)

    patch.setattr(Context, "append", append)


def suffix_too_short(patch: Patch) -> None:
    plain = decoder_module.prefill_plan

    def plan(layout: Layout, length: int, wanted: int) -> PrefillPlan:
        shorter = [
            replace(
                entry,
                makes={
                    name: replace(slot, window=slot.window and slot.window - 1) for name, slot in entry.makes.items()
                },
            )
            for entry in layout.layers
        ]
        return plain(Layout(tuple(shorter)), length, wanted)

    patch.setattr(decoder_module, "prefill_plan", plan)


def angles_in_bfloat16(patch: Patch) -> None:
    plain = rotary.rotary_angles

    def rounded(positions: Tensor, dim: int, base: float) -> tuple[Tensor, Tensor]:
        cos, sin = plain(positions, dim, base)
        return cos.bfloat16(), sin.bfloat16()

    patch.setattr(context_module, "rotary_angles", rounded)


def pairs_of_neighbours(patch: Patch) -> None:
    def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack(
            (first * angles[0] - second * angles[1], second * angles[0] + first * angles[1]), dim=-1
        ).flatten(-2)

    patch.setattr(context_module, "rotate", rotate)


def heads_grouped_the_other_way(patch: Patch) -> None:
    plain = product._product

    def grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        shares = q.shape[1] // k.shape[1]
        return plain(q, k.repeat(1, shares, 1, 1), v.repeat(1, shares, 1, 1), mask, causal)

    patch.setattr(product, "_product", grouped)


def scores_scaled_twice(patch: Patch) -> None:
    plain = F.scaled_dot_product_attention

    def scaled(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Tensor:
        return plain(2 * q, k, v, **rest)

    patch.setattr(F, "scaled_dot_product_attention", scaled)


def gradient_without_the_target(patch: Patch) -> None:
    patch.setattr(Tensor, "scatter_add_", lambda self, *_: self)


def ignored_labels_are_scored(patch: Patch) -> None:
    patch.setattr(loss, "IGNORE", -101)
    patch.setattr(Tensor, "masked_fill", lambda self, *_: self.clamp(min=0))


def state_through_a_side_channel(patch: Patch) -> None:
    """What a layer reads comes detached from its producer, as through a buffer."""
    plain = Decoder._call

    def call(self: Decoder, block: torch.nn.Module, x: Tensor, read: tuple[Tensor, ...], context: Context) -> object:
        detach = self.activation_checkpointing
        return plain(self, block, x, tuple(part.detach() if detach else part for part in read), context)

    patch.setattr(Decoder, "_call", call)


GQA_SOME, CONCAT_SOME = shipped("gqa-some"), shipped("concat-some")
WINDOWED, LOCAL = contract_case("windowed"), contract_case("local-history-shared")

MUTANTS: list[tuple[Callable[[Patch], None], Callable[[Case], None], Case]] = [
    (positions_shifted, check_cache, GQA_SOME),
    (padding_takes_positions, check_padding, GQA_SOME),
    (window_off_by_one, check_gqa, WINDOWED),
    (window_dropped_from_the_mask, check_gqa, WINDOWED),
    (documents_ignored, check_documents, CONCAT_SOME),
    (aligned_at_the_top_left, check_cache, CONCAT_SOME),
    (lengths_advance_after_the_first_layer, check_cache, CONCAT_SOME),
    (alpha_of_another_path, check_concat, CONCAT_SOME),
    (keys_of_another_head, check_concat, CONCAT_SOME),
    (suffix_too_short, check_suffix, LOCAL),
    (angles_in_bfloat16, check_gqa, GQA_SOME),
    (pairs_of_neighbours, check_concat, CONCAT_SOME),
    (heads_grouped_the_other_way, check_gqa, GQA_SOME),
    (scores_scaled_twice, check_gqa, GQA_SOME),
    (gradient_without_the_target, check_gqa, GQA_SOME),
    (ignored_labels_are_scored, check_gqa, GQA_SOME),
    (state_through_a_side_channel, check_checkpointing, CONCAT_SOME),
]


@pytest.mark.parametrize(("mutate", "check", "case"), MUTANTS, ids=[mutate.__name__ for mutate, _, _ in MUTANTS])
def test_fault_is_found(
    mutate: Callable[[Patch], None], check: Callable[[Case], None], case: Case, monkeypatch: Patch
) -> None:
    check(case)
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(case)


def test_a_reader_of_a_layer_that_is_not_its_owner_is_refused(monkeypatch: Patch) -> None:
    monkeypatch.setattr(KVPathConcat, "reads", lambda self, layer: (Read(layer + 1, "k_alpha"),))
    with pytest.raises(UserError, match="an owner must come before its reader"):
        CONCAT_SOME.decoder()
