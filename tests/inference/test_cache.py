"""The cache itself; that it gives what a pass without one gives is the business of tests/testing/test_parity.py."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvpath.analysis.allocation import cache_bytes
from kvpath.attention import Index
from kvpath.errors import UserError
from kvpath.inference import cache_file, memory
from kvpath.inference.cache import Cache, ring_columns
from kvpath.inference.entries import Entries
from kvpath.model import Decoder
from kvpath.testing.parity import uninitialised_memory_is_nan
from tests.attention.strategies import SharedUpper
from tests.cases import CASES, SHIPPED, Case, every_case, tokens
from tests.parity import CLOSE, logits


def shared_upper(window: int = 3) -> Case:
    """Layer 0 has a window, layer 1 none, layer 2 stores nothing."""
    return Case("", SharedUpper(n_heads=2, n_kv_heads=1, head_dim=4, window=window, middle=1), n_layers=3)


def cache_of(model: Decoder, batch: int, capacity: int = 0) -> Cache:
    return Cache(model.layout, batch, capacity, dtype=torch.float64, block=4)


def positions(cache: Cache, layer: int) -> list[list[int]]:
    return cache.index(layer, "k").positions.tolist()


@every_case
@torch.no_grad()
def test_elements_stored_are_those_of_the_layout(case: Case) -> None:
    model = case.decoder()
    cache = cache_of(model, 3)
    for length in (2, 5, 1, 1, 4):
        model(tokens(3, length), store=cache)
        expected = sum(
            slot.elements * min(len(cache), slot.window or len(cache)) for _, _, slot in model.layout.cached()
        )
        assert cache.elements == 3 * expected
    assert len(cache) == 13


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@torch.no_grad()
def test_bytes_are_those_of_the_layout_in_whole_blocks(case: Case, dtype: torch.dtype) -> None:
    layout = case.config().layout()
    cache = Cache(layout, 3, 5, dtype=dtype, block=4)
    for tokens_so_far, capacity in ((5, 8), (8, 8), (9, 12)):
        cache.reserve(tokens_so_far)
        assert cache.capacity == capacity
        kept = sum(slot.elements * min(capacity, slot.window or capacity) for _, _, slot in layout.cached())
        expected = 3 * kept * dtype.itemsize + 8 * capacity
        assert cache.bytes_allocated == cache_bytes(layout, 3, tokens_so_far, dtype, block=4) == expected


def test_padding_costs_positions_for_each_row() -> None:
    layout = shared_upper().config().layout()
    cache = Cache(layout, 2, block=4)
    valid = torch.tensor([[False, True], [True, True]])
    cache.begin(cache.place(torch.zeros(2, 2), valid))
    assert cache.bytes_allocated == cache_bytes(layout, 2, 2, torch.float32, padded=True, block=4)


@torch.no_grad()
def test_a_window_is_a_ring() -> None:
    model = shared_upper().decoder()
    cache = cache_of(model, 1)
    passes = ((2, [0, 1]), (1, [0, 1, 2]), (1, [3, 1, 2]), (3, [6, 4, 5]), (7, [12, 13, 11]))
    total = 0
    for length, ring in passes:
        model(tokens(1, length), store=cache)
        total += length
        assert positions(cache, 0) == [ring]
        assert positions(cache, 1) == [[*range(total)]]
    assert cache.tensors["0.k"].shape == (1, 1, 3, 4)


def test_ring_columns_by_brute_force() -> None:
    for window, total in itertools.product((1, 3, 4), range(1, 14)):
        places = {token % window: token for token in range(total)}
        assert ring_columns(window, total).tolist() == [places[place] for place in range(min(window, total))]


@torch.no_grad()
def test_a_suffix_after_a_short_start_stands_where_it_stands() -> None:
    """Tokens that no window needs are not formed; what follows them keeps its own positions."""
    cache = Cache(shared_upper(window=4).config().layout(), 1)

    def formed(first: int, end: int, count: int) -> list[list[int]]:
        cache.begin(Index(torch.arange(first, end)[None], plain=first == 0))
        numbers = torch.arange(end - count, end, dtype=torch.float32)
        history = cache.append(0, "k", numbers[None, :, None, None].expand(1, -1, 1, 4))
        assert history.values[0, :, 0, 0].tolist() == history.index.positions[0].tolist()
        cache.advance()
        return history.index.positions.tolist()

    assert formed(0, 2, 2) == [[0, 1]]
    assert formed(2, 12, 5) == [[0, 1, 7, 8, 9, 10, 11]]
    assert positions(cache, 0) == [[8, 9, 10, 11]]
    assert formed(12, 13, 1) == [[12, 9, 10, 11]]


def test_rows_go_on_from_their_own_positions() -> None:
    cache = Cache(shared_upper().config().layout(), 2)
    valid = torch.tensor([[False, False, True], [True, True, True]])
    first = cache.place(torch.zeros(2, 3), valid)
    assert first.positions.tolist() == [[0, 0, 0], [0, 1, 2]]
    cache.begin(first)
    cache.advance()
    assert cache.place(torch.zeros(2, 2)).positions.tolist() == [[1, 2], [3, 4]]


def test_plain_rows_stay_plain() -> None:
    cache = Cache(shared_upper().config().layout(), 2)
    for length, expected in ((3, [0, 1, 2]), (2, [3, 4])):
        index = cache.place(torch.zeros(2, length))
        assert index.positions.tolist() == [expected]
        cache.begin(index)
        assert cache.full_index().plain
        cache.advance()
    assert len(cache) == 5
    cache.begin(Index(torch.tensor([[9]])))
    assert cache.full_index().positions.tolist() == [[0, 1, 2, 3, 4, 9]] * 2
    assert not cache.full_index().plain


@torch.no_grad()
def test_layers_of_one_pass_see_the_same_length() -> None:
    """The last layer stands where the first one does: lengths advance once, after it."""
    model = shared_upper().decoder()
    cache = cache_of(model, 1)
    lengths: list[int] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: lengths.append(len(cache)))
    for length in (4, 1):
        model(tokens(1, length), store=cache)
    assert lengths == [0, 0, 0, 4, 4, 4]


@every_case
@torch.no_grad()
def test_a_step_copies_no_history(case: Case) -> None:
    """What a layer is given of a slot lies in the cache's own memory, and ends with the last token."""
    model = case.decoder()
    cache = cache_of(model, 2, 16)
    model(tokens(2, 6), store=cache)
    memory_of = {name: part.untyped_storage().data_ptr() for name, part in cache.tensors.items()}
    cache.begin(cache.place(tokens(2, 1)))
    for layer, name, slot in model.layout.cached():
        history = cache.append(layer, name, torch.zeros(2, 1, slot.heads, slot.dim, dtype=torch.float64))
        assert history.values.untyped_storage().data_ptr() == memory_of[f"{layer}.{name}"]
        assert history.values.shape[1] == min(7, slot.window or 7) == len(history.index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@torch.no_grad()
def test_a_slot_may_have_a_dtype_of_its_own(dtype: torch.dtype) -> None:
    case = next(case for case in SHIPPED if case.name == "concat-some")
    model, tokens_BT = case.decoder(), tokens(2, 6)
    cache = Cache(model.layout, 2, dtype=torch.float64, slot_dtypes={"k_alpha": dtype}, block=4)
    found = torch.cat([model(tokens_BT[:, part], store=cache) for part in (slice(0, 5), slice(5, 6))], dim=1)
    assert cache.tensors["0.k_alpha"].dtype == dtype
    assert cache.tensors["0.v_alpha"].dtype == torch.float64
    off = (found - logits(model, tokens_BT)).abs().max()
    assert 1e-12 < off < (1e-4 if dtype == torch.float32 else 1.0)
    assert cache.bytes_allocated == cache_bytes(model.layout, 2, 6, torch.float64, {"k_alpha": dtype}, block=4)


@torch.no_grad()
def test_a_fork_goes_on_by_itself() -> None:
    model = shared_upper().decoder()
    cache = cache_of(model, 2)
    model(tokens(2, 5), store=cache)
    before = {name: part.clone() for name, part in cache.tensors.items()}
    fork = cache.fork(3)
    model(tokens(6, 4), store=fork)
    assert (fork.batch, len(fork), cache.batch, len(cache)) == (6, 9, 2, 5)
    for name, part in cache.tensors.items():
        torch.testing.assert_close(part, before[name], rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def test_unwritten_memory_is_poisoned_in_the_runner() -> None:
    with uninitialised_memory_is_nan():
        cache = cache_of(shared_upper().decoder(), 1, 4)
    assert cache.tensors["1.k"].isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def filled(case: Case) -> tuple[Decoder, Cache, Tensor]:
    model, tokens_BT = case.decoder(), tokens(2, 9)
    cache = Cache(model.layout, 2, dtype=torch.float64, slot_dtypes={"k": torch.float32}, block=4)
    with torch.no_grad():
        model(tokens_BT[:, :7], store=cache)
    return model, cache, tokens_BT


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ("gqa-some", "windowed", "mla")], ids=str)
@torch.no_grad()
def test_a_file_holds_the_tokens_and_not_the_room(case: Case, tmp_path: Path) -> None:
    model, cache, tokens_BT = filled(case)
    cache.save(tmp_path / "cache")
    stored = load_file(tmp_path / "cache")
    for layer, name, slot in model.layout.cached():
        assert stored[f"{layer}.{name}"].shape == (2, min(7, slot.window or 7), slot.heads, slot.dim)
    loaded = Cache.load(tmp_path / "cache", model.layout)
    assert (loaded.capacity, loaded.block, loaded.slot_dtypes) == (cache.capacity, 4, cache.slot_dtypes)
    torch.testing.assert_close(model(tokens_BT[:, 7:], store=loaded), model(tokens_BT[:, 7:], store=cache), **CLOSE)


def test_files_that_do_not_fit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, _ = filled(shared_upper())
    path = tmp_path / "cache"
    cache.save(path)
    with pytest.raises(
        UserError, match=r"another layout: slot 0\.k is \[1, 4, 3\] there and \[1, 4, 5\] here .*; 2 slots"
    ):
        Cache.load(path, shared_upper(window=5).config().layout())
    with pytest.raises(UserError, match="is no cache that can be read"):
        Cache.load(tmp_path / "absent", model.layout)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="is no cache that can be read"):
        Cache.load(path, model.layout)
    with monkeypatch.context() as patch:
        patch.setattr(cache_file, "FORMAT_VERSION", 7)
        cache.save(path)
    with pytest.raises(UserError, match="has format_version 7; this version of kvpath reads 1"):
        Cache.load(path, model.layout)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(UserError, match="holds no cache of kvpath"):
        Cache.load(path, model.layout)


def test_what_does_not_fit_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = shared_upper().config().layout()
    one = cache_bytes(layout, 1, 1024, torch.float32)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 5 * one)
    assert Cache(layout, 4, 1024).capacity == 1024
    monkeypatch.setattr(Entries, "resized", lambda *_: pytest.fail("allocated"))
    with pytest.raises(
        UserError,
        match=r"a cache of 8 rows x 1,024 tokens in float32 needs [\d,]+ bytes, and cpu has [\d,]+ bytes free:"
        r" 5 rows of that length fit",
    ):
        Cache(layout, 8, 1000)


def test_free_memory_is_known_here() -> None:
    free = memory.free_bytes("cpu")
    assert free is not None
    assert 0 < free < 2**50
    assert memory.free_bytes("meta") is None


def test_what_a_control_group_allows(tmp_path: Path) -> None:
    groups, folder = tmp_path / "cgroup", tmp_path / "jobs" / "mine"
    folder.mkdir(parents=True)
    groups.write_text("1:name=x:/other\n0::/jobs/mine\n")
    for name, text in (("max", "1000\n"), ("current", "700\n"), ("stat", "anon 400\ninactive_file 250\n")):
        (folder / f"memory.{name}").write_text(text)
    assert memory.group_free(groups, tmp_path) == 1000 - 700 + 250
    (folder / "memory.max").write_text("max\n")
    assert memory.group_free(groups, tmp_path) is None
    assert memory.group_free(tmp_path / "absent", tmp_path) is None


def test_a_batch_of_another_size_is_refused() -> None:
    model = replace(shared_upper(), name="other").decoder()
    with pytest.raises(ValueError, match="a cache of 2 rows was given 1 by a pass"), torch.no_grad():
        model(tokens(1, 3), store=cache_of(model, 2))
