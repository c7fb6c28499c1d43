import pytest
import torch

from kvpath.attention import CLA, GQA, MLA, KVPathResidual
from kvpath.inference.workload import Work, decoding_work, prefill_work, random_cache
from tests.cases import SHIPPED, Case

# 2 layers over a width of 10, a feed-forward of 7 and 15 rows of vocabulary
GQA_CASE = Case("gqa", GQA(n_heads=4, n_kv_heads=2, head_dim=6), n_layers=2)
ATTENTION, MLP, HEAD = 2 * 10 * 24 + 2 * 10 * 12, 3 * 10 * 7, 10 * 15
NORMS = 5 * 10


def test_the_bound_is_what_takes_longer() -> None:
    work = Work(bytes=100, flops=600)
    assert work.seconds(bytes_per_s=10.0, flops_per_s=100.0) == 10.0
    assert work.seconds(bytes_per_s=50.0, flops_per_s=100.0) == 6.0


def test_decoding_by_hand() -> None:
    work = decoding_work(GQA_CASE.config(), context=20, batch=3, dtype=torch.bfloat16)
    weights = 2 * (ATTENTION + MLP) + HEAD
    cache = 2 * 2 * 2 * 6 * 20
    assert work.bytes == 2 * (weights + NORMS + 3 * cache)
    assert work.flops == 3 * 2 * (weights + 2 * 4 * (6 + 6) * 20)


def test_a_tied_table_is_read_as_the_head() -> None:
    tied = decoding_work(GQA_CASE.config(tied_embeddings=True), 20, 1, torch.float32)
    assert tied == decoding_work(GQA_CASE.config(), 20, 1, torch.float32)


@pytest.mark.parametrize("earlier", [0, 30])
def test_prefill_by_hand(earlier: int) -> None:
    work = prefill_work(GQA_CASE.config(), earlier, 8, torch.float32)
    # The last layer forms keys and values of all, and computes the last position alone.
    keys_and_values, the_rest = 2 * 10 * 12, 2 * 10 * 24
    weights = 8 * (ATTENTION + MLP) + 8 * keys_and_values + the_rest + MLP + HEAD
    pairs = sum(range(earlier + 1, earlier + 9)) + earlier + 8
    assert work.flops == 2 * (weights + 4 * (6 + 6) * pairs)
    assert work.bytes == 4 * (2 * (ATTENTION + MLP) + HEAD + NORMS + 2 * 2 * 2 * 6 * earlier)


def test_prefill_computes_no_more_than_is_needed() -> None:
    shared, own = (
        prefill_work(Case("", attention, n_layers=4).config(), 0, 32, torch.float32).flops
        for attention in (
            CLA(n_heads=4, n_kv_heads=2, head_dim=6, group_size=4),
            GQA(n_heads=4, n_kv_heads=2, head_dim=6),
        )
    )
    assert shared < own / 5


@pytest.mark.parametrize(
    "attention",
    [
        MLA(n_heads=3, head_dim=5, latent_dim=7, rotary_dim=4),
        KVPathResidual(n_heads=4, n_kv_heads=2, head_dim=6, delta_dim=2, path_length=2),
    ],
    ids=lambda attention: type(attention).__name__,
)
def test_what_is_expanded_or_rebuilt_from_earlier_tokens_counts(attention: MLA | KVPathResidual) -> None:
    config = Case("", attention, n_layers=2).config()
    late, early = (prefill_work(config, earlier, 8, torch.float32).flops for earlier in (100, 0))
    heads = config.layout().layers[0].heads
    assert late - early > 9 * 100 * heads.flops_per_key


@pytest.mark.parametrize("case", SHIPPED[::3], ids=str)
@torch.no_grad()
def test_a_random_cache_decodes(case: Case) -> None:
    model = case.decoder().eval()
    tokens_BT = torch.tensor([[3], [3], [5]])
    out = []
    for compact in (False, True):
        if compact:
            model.compact()
        cache = random_cache(model.layout, 9, batch=3, capacity=12, dtype=torch.float64)
        assert (len(cache), cache.batch) == (9, 3)
        out.append(model(tokens_BT, store=cache))
    torch.testing.assert_close(out[0][0], out[0][1], atol=1e-12, rtol=0)
    assert not torch.equal(out[0][0], out[0][2])
    torch.testing.assert_close(out[0], out[1], atol=1e-9, rtol=0)
    entries = [cache.entries(layer, name).values[0, 0] for layer, name, _ in model.layout.cached()]
    assert len({float(entry.flatten()[0]) for entry in entries}) == len(entries)
