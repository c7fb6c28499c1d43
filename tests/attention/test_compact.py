"""The compact modules give what the plain ones give, by every way through a cache, and own nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kvpath.attention import CLA, GQA, Context, KVPathResidual, compact, product, tiles
from kvpath.attention.accounting import read_elements
from kvpath.attention.gqa import GroupedQueryAttention
from kvpath.inference import Cache
from kvpath.model import Decoder
from tests.cases import SHIPPED, Case, every_case, tokens
from tests.parity import CLOSE, chunked, logits, packed, padded_chunks

JOIN_NOTHING = (GQA, CLA)
"""Their plain modules read what is stored where it lies, too."""

shipped_compact = pytest.mark.parametrize(
    "case", [case for case in SHIPPED if not isinstance(case.attention, JOIN_NOTHING)], ids=str
)


def compacted(case: Case, dtype: torch.dtype = torch.float64) -> Decoder:
    model = case.decoder(dtype).eval()
    model.compact()
    return model


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a few elements, where otherwise everything here fits into one."""
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 50)
    monkeypatch.setattr(tiles, "FEWEST_KEYS", 2)
    monkeypatch.setattr(tiles, "MOST_KEYS", 3)
    monkeypatch.setattr(tiles, "QUERY_ROWS", 4)
    monkeypatch.setattr(product, "MASK_ELEMENTS", 40)


@every_case
@pytest.mark.parametrize("sizes", [[70], [6]], ids=["one-shot", "by-token"])
def test_rows_of_one_length(case: Case, sizes: list[int]) -> None:
    tokens_BT = tokens(2, sum(sizes) + 3)
    assert_close(chunked(compacted(case), tokens_BT, sizes), logits(case.decoder(), tokens_BT), **CLOSE)


@every_case
@pytest.mark.parametrize("sizes", [[17], [3, 1, 9, 2]], ids=["one-shot", "chunks"])
@pytest.mark.usefixtures("small_tiles")
def test_rows_of_one_length_in_small_tiles(case: Case, sizes: list[int]) -> None:
    tokens_BT = tokens(2, 17)
    assert_close(chunked(compacted(case), tokens_BT, sizes), logits(case.decoder(), tokens_BT), **CLOSE)


@every_case
@pytest.mark.parametrize("sizes", [[11], [3, 1, 5, 2]], ids=["one-shot", "chunks"])
@pytest.mark.usefixtures("small_tiles")
def test_left_padded_rows(case: Case, sizes: list[int]) -> None:
    rows = [tokens(length, seed=length) for length in (4, 11, 7)]
    for row, found in zip(rows, padded_chunks(compacted(case), rows, sizes), strict=True):
        assert_close(found, logits(case.decoder(), row[None])[0], **CLOSE)


@every_case
@pytest.mark.usefixtures("small_tiles")
def test_packed_documents(case: Case) -> None:
    documents = [tokens(length, seed=length) for length in (5, 1, 6)]
    tokens_1T, index = packed(documents)
    whole = chunked(compacted(case), tokens_1T, [5, 2, 4, 1], index)
    for own, found in zip(documents, whole[0].split([5, 1, 6]), strict=True):
        assert_close(found, logits(case.decoder(), own[None])[0], **CLOSE)


@every_case
@pytest.mark.parametrize("earlier", [0, 7])
@torch.no_grad()
@pytest.mark.usefixtures("small_tiles")
def test_suffix_prefill_fills_the_cache(case: Case, earlier: int) -> None:
    plain, model, tokens_BT = case.decoder(), compacted(case), tokens(2, earlier + 11)
    caches = [Cache(plain.layout, 2, dtype=torch.float64) for _ in range(2)]
    if earlier:
        plain(tokens_BT[:, :earlier], store=caches[0])
        model(tokens_BT[:, :earlier], store=caches[1])
    expected = plain(tokens_BT[:, earlier:], store=caches[0])[:, -3:]
    assert_close(model(tokens_BT[:, earlier:], store=caches[1], wanted=3), expected, **CLOSE)
    for owner, name, _ in plain.layout.cached():
        found, full = (cache.entries(owner, name).values for cache in reversed(caches))
        assert_close(found, full, **CLOSE)


@shipped_compact
def test_bfloat16_is_about_as_near_to_the_truth_as_without(case: Case) -> None:
    squared = {True: 0.0, False: 0.0}
    for seed in range(5):
        tokens_BT = tokens(12, 6, seed=seed)
        truth = logits(case.decoder(torch.bfloat16, seed=seed).double(), tokens_BT)
        for in_compact in squared:
            model = case.decoder(torch.bfloat16, seed=seed).eval()
            if in_compact:
                model.compact()
            found = chunked(model, tokens_BT, [3])
            squared[in_compact] += float((found.double() - truth).square().sum())
    assert 0 < squared[True] <= 4 * squared[False]


@every_case
def test_modules_own_no_parameters_and_leave_the_model_as_it_was(case: Case) -> None:
    model = case.decoder().eval()
    before = list(model.state_dict()), len(list(model.modules()))
    model.compact()
    assert (list(model.state_dict()), len(list(model.modules()))) == before
    attentions = [block.get_submodule("attention") for block in model.blocks]
    for layer in range(case.n_layers):
        module = case.attention.compact(layer, attentions)
        assert module is None or not list(module.parameters())
        assert module is None or not list(module.state_dict())


@every_case
def test_layouts_store_and_touch_the_same(case: Case) -> None:
    plain, lean = case.config().layout(), case.attention.compact_layout(case.config())
    assert list(lean.cached()) == list(plain.cached())
    assert read_elements(lean, 50) == read_elements(plain, 50)


def test_every_shipped_strategy_has_compact_modules() -> None:
    for case in SHIPPED:
        attentions = [block.get_submodule("attention") for block in case.decoder().blocks]
        assert all(case.attention.compact(layer, attentions) for layer in range(case.n_layers))


def test_a_module_that_keeps_its_product_to_itself_stays_as_it_is() -> None:
    class Own(nn.Module):
        def forward(self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context) -> tuple[Tensor, tuple[()]]:
            return x_BTC, ()

    assert GQA(n_heads=2, n_kv_heads=1, head_dim=4).compact(0, [Own()]) is None


def test_residual_passes_no_state_on() -> None:
    case = next(case for case in SHIPPED if isinstance(case.attention, KVPathResidual))
    slots = case.attention.compact_layout(case.config()).slots()
    assert all(slot.cached for _, _, slot in slots)


class ScaledAttention(compact.CompactAttention[GroupedQueryAttention]):
    """Shows by its result that it ran; holds a derived weight."""

    def __init__(self, plain: GroupedQueryAttention) -> None:
        super().__init__(plain)
        self.w_o: Tensor
        self.register_buffer("w_o", 2 * plain.get_parameter("w_o.weight").detach(), persistent=False)

    def forward(self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context) -> tuple[Tensor, tuple[Tensor, ...]]:
        update, made = self.plain(x_BTC, read, context)
        return 2 * update, made


@dataclass(kw_only=True)
class Scaled(GQA):
    def compact(self, layer: int, attentions: Sequence[nn.Module]) -> nn.Module:
        plain = attentions[layer]
        assert isinstance(plain, GroupedQueryAttention)
        return ScaledAttention(plain)


SCALED = Case("scaled", Scaled(n_heads=2, n_kv_heads=1, head_dim=4))


def ran_compact(model: Decoder, expected: Tensor) -> bool:
    return not torch.equal(chunked(model, tokens(1, 4), [4]), expected)


def test_used_with_a_store_without_gradients_and_until_weights_change() -> None:
    model, tokens_BT = SCALED.decoder().eval(), tokens(1, 4)
    expected = logits(model, tokens_BT)
    assert not ran_compact(model, expected)
    model.compact()
    assert ran_compact(model, expected)
    assert torch.equal(logits(model, tokens_BT), expected)
    assert torch.equal(model(tokens_BT, store=Cache(model.layout, 1, dtype=torch.float64)), expected)
    for change in (
        model.expand,
        lambda: model.train().eval(),
        lambda: model.load_state_dict(model.state_dict()),
        lambda: nn.ModuleList([model]).load_state_dict(nn.ModuleList([model]).state_dict()),
        model.double,
    ):
        model.compact()
        change()
        assert not ran_compact(model, expected)
