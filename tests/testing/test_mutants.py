"""Faults put in by hand: the parity runner finds each, by the route that is named."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kvpath.attention import Context, History, Index, KVPathConcat
from kvpath.attention import context as context_module
from kvpath.inference.cache import Cache
from kvpath.inference.entries import Entries
from kvpath.model import Decoder
from kvpath.testing import ROUTES, Toy, check_parity, toys_of
from tests.attention.test_layout import contract_case

Patch = pytest.MonkeyPatch
Made = tuple[Tensor, ...]

CONCAT = toys_of(KVPathConcat)[1]
"""Paths of two layers, three of them over five."""

WINDOWED = contract_case("windowed")


def positions_off_by_one(patch: Patch) -> None:
    plain = Cache.place

    def place(self: Cache, tokens: Tensor, valid: Tensor | None = None) -> Index:
        index = plain(self, tokens, valid)
        return index if len(self) == 0 else Index(index.positions + 1, index.valid)

    patch.setattr(Cache, "place", place)


def mask_shows_the_next_token(patch: Patch) -> None:
    mask_moved(patch, 1)


def mask_hides_the_token_itself(patch: Patch) -> None:
    mask_moved(patch, -1)


def mask_moved(patch: Patch, by: int) -> None:
    def visibility(self: Context, n_queries: int, keys: Index, window: int | None) -> tuple[Tensor, bool]:
        distance = self.new.last(n_queries).positions[:, :, None] - keys.positions[:, None, :]
        return (distance >= -by)[:, None], False

    patch.setattr(Context, "visibility", visibility)


def window_off_by_one(patch: Patch) -> None:
    plain = context_module.visible
    patch.setattr(context_module, "visible", lambda queries, keys, window: plain(queries, keys, window and window + 1))


def ring_off_by_one(patch: Patch) -> None:
    """A ring that writes one place further than where it says that the token stands."""
    plain = Entries.put

    def put(self: Entries, where: slice | Tensor, new: Tensor) -> None:
        full = isinstance(where, slice) and self.slot.window is not None and self.room == self.slot.window
        if full and isinstance(where, slice) and new.shape[1] == 1:
            place = (where.start + 1) % self.room
            where = slice(place, place + 1)
        plain(self, where, new)

    patch.setattr(Entries, "put", put)


def alpha_rotated(patch: Patch) -> None:
    plain = Context.append

    def append(self: Context, name: str, new: Tensor) -> History:
        return plain(self, name, self.rotate(new) if name == "k_alpha" else new)

    patch.setattr(Context, "append", append)


def wrong_owner(patch: Patch) -> None:
    """Every layer that reads receives what the first one did, in every pass."""
    plain = Decoder._call
    first: dict[tuple[int, ...], Made] = {}

    def call(self: Decoder, block: nn.Module, x: Tensor, read: Made, context: Context, *rest: object) -> object:
        if read:
            if context.layer == 1:
                first[1,] = read
            read = first[1,]
        return plain(self, block, x, read, context, *rest)

    patch.setattr(Decoder, "_call", call)


def wrong_owner_in_the_cache(patch: Patch) -> None:
    plain = Cache.append

    def append(self: Cache, layer: int, name: str, new: Tensor) -> History:
        history = plain(self, layer, name, new)
        if layer != 2 or name != "v_alpha":
            return history
        return history._replace(values=self._slots[0, name].get(history.values.shape[1], new.dtype))

    patch.setattr(Cache, "append", append)


def delta_of_the_layer_before(patch: Patch) -> None:
    plain = Context.append
    before: dict[str, History] = {}

    def append(self: Context, name: str, new: Tensor) -> History:
        history = plain(self, name, new)
        if not name.endswith("delta"):
            return history
        earlier, before[name] = before.get(name, history), history
        return earlier if self.layer and earlier.values.shape == history.values.shape else history

    patch.setattr(Context, "append", append)


def padding_visible(patch: Patch) -> None:
    plain = context_module.visible
    patch.setattr(
        context_module,
        "visible",
        lambda queries, keys, window: plain(queries, Index(keys.positions, None, keys.documents), window),
    )


def stale_slot_after_reorder(patch: Patch) -> None:
    plain = Entries.rows
    calls: list[int] = []

    def rows(self: Entries, chosen: Tensor, used: int) -> Entries:
        calls.append(1)
        return plain(self, torch.arange(len(chosen)) % len(self.memory) if len(calls) % 5 == 0 else chosen, used)

    patch.setattr(Entries, "rows", rows)


def entries_not_written(patch: Patch) -> None:
    plain = Entries.put
    patch.setattr(Entries, "put", lambda self, where, new: plain(self, where, new) if new.shape[1] > 1 else None)


def gradient_into_alpha_dropped(patch: Patch) -> None:
    plain = Decoder._call

    def call(self: Decoder, block: nn.Module, x: Tensor, read: Made, context: Context, *rest: object) -> object:
        return plain(self, block, x, tuple(part.detach() for part in read), context, *rest)

    patch.setattr(Decoder, "_call", call)


MUTANTS: list[tuple[Callable[[Patch], None], str, Toy]] = [
    (positions_off_by_one, "token by token", CONCAT),
    (mask_shows_the_next_token, "who depends on whom", CONCAT),
    (mask_hides_the_token_itself, "who depends on whom", CONCAT),
    (window_off_by_one, "who depends on whom", WINDOWED),
    (ring_off_by_one, "token by token", WINDOWED),
    (alpha_rotated, "all positions shifted", CONCAT),
    (wrong_owner, "layers alone", CONCAT),
    (wrong_owner_in_the_cache, "token by token", CONCAT),
    (delta_of_the_layer_before, "layers alone", CONCAT),
    (padding_visible, "left-padded batch", CONCAT),
    (padding_visible, "left-padded batch, no cache", CONCAT),
    (stale_slot_after_reorder, "reordered and forked rows", CONCAT),
    (entries_not_written, "token by token", CONCAT),
    (gradient_into_alpha_dropped, "gradients by differences", CONCAT),
]


@pytest.mark.parametrize(("mutate", "name", "toy"), MUTANTS, ids=[f"{m.__name__}: {name}" for m, name, _ in MUTANTS])
def test_fault_is_found(mutate: Callable[[Patch], None], name: str, toy: Toy, monkeypatch: Patch) -> None:
    (route,) = [route for route in ROUTES if route.name == name]
    check_parity([toy], [route])
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=name):
        check_parity([toy], [route])
