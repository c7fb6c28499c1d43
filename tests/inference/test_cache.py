import torch
from torch import Tensor

from kvpath.attention import Index
from kvpath.inference import GrowingCache
from tests.attention.strategies import SharedUpper
from tests.cases import Case, every_case, tokens


def shared_upper(window: int = 3) -> Case:
    """Layer 0 has a window, layer 1 none, layer 2 stores nothing."""
    return Case("", SharedUpper(n_heads=2, n_kv_heads=1, head_dim=4, window=window, middle=1), n_layers=3)


@every_case
@torch.no_grad()
def test_elements_stored_are_those_of_the_layout(case: Case) -> None:
    model, cache = case.decoder(), GrowingCache(case.config().layout())
    for length in (2, 5, 1, 1, 4):
        model(tokens(3, length), store=cache)
        expected = sum(
            slot.elements * min(len(cache), slot.window or len(cache)) for _, _, slot in model.layout.cached()
        )
        assert cache.elements == 3 * expected
    assert len(cache) == 13


def positions(cache: GrowingCache, layer: int) -> list[list[int]]:
    return cache.index(layer, "k").positions.tolist()


@torch.no_grad()
def test_a_window_keeps_the_last_tokens() -> None:
    model = shared_upper().decoder()
    cache = GrowingCache(model.layout)
    for length, window, whole in ((2, [0, 1], [0, 1]), (3, [2, 3, 4], [0, 1, 2, 3, 4]), (1, [3, 4, 5], [*range(6)])):
        model(tokens(1, length), store=cache)
        assert positions(cache, 0) == [window]
        assert positions(cache, 1) == [whole]


@torch.no_grad()
def test_a_suffix_after_a_short_start_stands_where_it_stands() -> None:
    """Tokens that no window needs are not formed; what follows them keeps its own positions."""
    cache = GrowingCache(shared_upper(window=4).config().layout())

    def formed(first: int, end: int, count: int) -> Tensor:
        new = Index(torch.arange(first, end)[None], plain=first == 0)
        cache.begin(new)
        index = cache.append(0, "k", torch.zeros(1, count, 1, 4)).index
        cache.advance()
        return index.positions

    assert formed(0, 2, 2).tolist() == [[0, 1]]
    assert formed(2, 12, 5).tolist() == [[0, 1, 7, 8, 9, 10, 11]]
    assert positions(cache, 0) == [[8, 9, 10, 11]]


def test_rows_go_on_from_their_own_positions() -> None:
    cache = GrowingCache(shared_upper().config().layout())
    valid = torch.tensor([[False, False, True], [True, True, True]])
    first = cache.place(torch.zeros(2, 3), valid)
    assert first.positions.tolist() == [[0, 0, 0], [0, 1, 2]]
    assert first.valid is not None
    cache.begin(first)
    cache.advance()
    assert cache.place(torch.zeros(2, 2)).positions.tolist() == [[1, 2], [3, 4]]


def test_plain_rows_stay_plain() -> None:
    cache = GrowingCache(shared_upper().config().layout())
    for length, expected in ((3, [0, 1, 2]), (2, [3, 4])):
        index = cache.place(torch.zeros(2, length))
        assert index.positions.tolist() == [expected]
        cache.begin(index)
        assert cache.full_index().plain
        cache.advance()
    assert len(cache) == 5


@torch.no_grad()
def test_layers_of_one_pass_see_the_same_length() -> None:
    """The last layer stands where the first one does: lengths advance once, after it."""
    model = shared_upper().decoder()
    cache = GrowingCache(model.layout)
    lengths: list[int] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: lengths.append(len(cache)))
    for length in (4, 1):
        model(tokens(1, length), store=cache)
    assert lengths == [0, 0, 0, 4, 4, 4]
