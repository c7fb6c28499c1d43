"""Every way of running a model gives the same logits, for every layout (float64)."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kvpath.attention import Index
from kvpath.inference import GrowingCache
from tests.cases import Case, every_case, tokens
from tests.parity import CLOSE, chunked, left_padded, logits, packed, padded_chunks

LENGTH = 11


@every_case
@pytest.mark.parametrize("sizes", [[11], [3, 1, 5, 2], [2, 7], []], ids=["one-shot", "chunks", "growing", "by-token"])
def test_cache_gives_what_a_pass_without_one_gives(case: Case, sizes: list[int]) -> None:
    model, tokens_BT = case.decoder(), tokens(2, LENGTH)
    assert_close(chunked(model, tokens_BT, sizes), logits(model, tokens_BT), **CLOSE)


@every_case
@pytest.mark.parametrize("sizes", [[11], [3, 1, 5, 2], [1] * 11], ids=["one-shot", "chunks", "by-token"])
def test_left_padded_rows_give_what_each_gives_alone(case: Case, sizes: list[int]) -> None:
    model, rows = case.decoder(), [tokens(length, seed=length) for length in (4, 11, 7)]
    for row, found in zip(rows, padded_chunks(model, rows, sizes), strict=True):
        assert_close(found, logits(model, row[None])[0], **CLOSE)


@every_case
def test_left_padding_without_a_cache(case: Case) -> None:
    model, rows = case.decoder(), [tokens(length, seed=length) for length in (4, 11, 7)]
    tokens_BT, valid_BT = left_padded(rows)
    whole = logits(model, tokens_BT, Index((valid_BT.cumsum(1) - 1).clamp(min=0), valid_BT))
    for row, found in zip(rows, whole, strict=True):
        assert_close(found[-len(row) :], logits(model, row[None])[0], **CLOSE)


@every_case
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("sizes", [None, [12], [5, 2, 4, 1]], ids=["no-cache", "one-shot", "chunks"])
def test_packed_documents_give_what_each_gives_alone(
    case: Case, order: tuple[int, ...], sizes: list[int] | None
) -> None:
    model, documents = case.decoder(), [tokens(length, seed=length) for length in (5, 1, 6)]
    documents = [documents[which] for which in order]
    tokens_1T, index = packed(documents)
    whole = logits(model, tokens_1T, index) if sizes is None else chunked(model, tokens_1T, sizes, index)
    for own, found in zip(documents, whole[0].split([len(own) for own in documents]), strict=True):
        assert_close(found, logits(model, own[None])[0], **CLOSE)


@every_case
@pytest.mark.parametrize("wanted", [1, 4, LENGTH])
def test_suffix_without_a_cache(case: Case, wanted: int) -> None:
    model, tokens_BT = case.decoder(), tokens(2, LENGTH)
    assert_close(model(tokens_BT, wanted=wanted), model(tokens_BT)[:, -wanted:], **CLOSE)


@every_case
@pytest.mark.parametrize("wanted", [1, 4])
@pytest.mark.parametrize("earlier", [0, 2, 7])
@torch.no_grad()
def test_suffix_prefill_builds_the_cache_of_a_full_one(case: Case, earlier: int, wanted: int) -> None:
    model, tokens_BT = case.decoder(), tokens(2, earlier + LENGTH)
    full, suffix = GrowingCache(model.layout), GrowingCache(model.layout)
    for cache in (full, suffix):
        if earlier:
            model(tokens_BT[:, :earlier], store=cache)
    expected = model(tokens_BT[:, earlier:], store=full)[:, -wanted:]
    assert_close(model(tokens_BT[:, earlier:], store=suffix, wanted=wanted), expected, **CLOSE)
    for owner, name, _ in model.layout.cached():
        assert_close(suffix.entries(owner, name).values, full.entries(owner, name).values, **CLOSE)
        assert torch.equal(suffix.index(owner, name).positions, full.index(owner, name).positions)


@every_case
@torch.no_grad()
def test_suffix_prefill_of_left_padded_rows(case: Case) -> None:
    model, rows = case.decoder(), [tokens(length, seed=length) for length in (4, 11, 7)]
    tokens_BT, valid_BT = left_padded(rows)
    cache = GrowingCache(model.layout)
    prefilled = model(tokens_BT, index=cache.place(tokens_BT, valid_BT), store=cache, wanted=1)
    following = tokens(3, 2, seed=9)
    decoded = model(following, store=cache)
    for row, more, last, after in zip(rows, following, prefilled, decoded, strict=True):
        alone = logits(model, torch.cat((row, more))[None])[0]
        assert_close(torch.cat((last, after)), alone[-3:], **CLOSE)


@every_case
def test_checkpointed_gradients_are_equal(case: Case) -> None:
    gradients: list[dict[str, Tensor]] = []
    for checkpointing in (False, True):
        model = case.decoder()
        model.activation_checkpointing = checkpointing
        model(tokens(2, LENGTH), tokens(2, LENGTH, seed=3)).total.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert len(gradients[0]) == len(list(model.parameters()))
    assert all(gradient.abs().max() > 1e-6 for gradient in gradients[0].values())
    assert_close(gradients[1], gradients[0], **CLOSE)


@every_case
def test_suffix_gradients_are_those_of_the_whole(case: Case) -> None:
    gradients: list[dict[str, Tensor]] = []
    for wanted in (None, 3):
        model = case.decoder()
        model(tokens(2, LENGTH), wanted=wanted)[:, -3:].square().sum().backward()
        gradients.append(
            {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
        )
    assert_close(gradients[1], gradients[0], **CLOSE)
