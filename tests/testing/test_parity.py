"""Every strategy by every route, and the table that says so."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from kvpath.attention import CLA, GQA, AttentionStrategy, Heads, KVPathConcat, Slot
from kvpath.errors import UserError
from kvpath.testing import ROUTES, SLOW_ROUTES, Route, Toy, check_parity, concrete_strategies, run_parity, toys_of
from kvpath.testing.compiled import decoding
from kvpath.testing.toys import toys_of_config
from tests.cases import CONTRACT, SHIPPED

OURS = [strategy for strategy in concrete_strategies() if strategy.__module__.startswith("kvpath.")]
TOYS = [toy for strategy in OURS for toy in toys_of(strategy)]
FIRST = [toys_of(strategy)[1] for strategy in OURS]

MEMORY = "allocated bytes, share off"
SHORT = [replace(toy, n_layers=3) for toy in FIRST]


@pytest.mark.parametrize("toy", [*TOYS, *CONTRACT], ids=str)
@pytest.mark.parametrize("route", [route for route in ROUTES if route.name != MEMORY], ids=str)
def test_every_strategy_by_every_route(toy: Toy, route: Route) -> None:
    check_parity([toy], [route])


@pytest.mark.parametrize("toy", FIRST, ids=str)
def test_memory_once_for_each_strategy(toy: Toy) -> None:
    check_parity([toy], [route for route in ROUTES if route.name == MEMORY])


@pytest.mark.slow
@pytest.mark.parametrize("toy", SHIPPED, ids=str)
def test_more_variants(toy: Toy) -> None:
    check_parity([toy])


@pytest.mark.parametrize("route", SLOW_ROUTES, ids=str)
@pytest.mark.parametrize("toy", SHORT, ids=str)
def test_rounding_and_tracing_once_for_each_strategy(toy: Toy, route: Route) -> None:
    check_parity([toy], [route])


@pytest.mark.slow
@pytest.mark.parametrize("toy", [toy for toy in [*TOYS, *CONTRACT] if toy not in FIRST], ids=str)
def test_rounding_and_tracing_of_all(toy: Toy) -> None:
    check_parity([toy], SLOW_ROUTES)


@pytest.mark.slow
@pytest.mark.parametrize("toy", FIRST, ids=str)
def test_compiled(toy: Toy) -> None:
    # The compiler rounds float32 cosines, which rebuilt keys are rotated by, in its own way.
    check_parity([toy], [Route("compiled", decoding, 1e-6)])


def test_all_that_is_shipped_is_found() -> None:
    assert {type(case.attention) for case in SHIPPED} <= set(OURS)


def test_examples_cover_heads_and_short_paths() -> None:
    concat = [toy.attention for toy in toys_of(KVPathConcat)]
    assert all(isinstance(one, KVPathConcat) for one in concat)
    shares = {(one.n_kv_heads == one.n_heads, one.n_kv_heads == 1) for one in concat if isinstance(one, KVPathConcat)}
    assert shares == {(True, False), (False, False), (False, True)}
    assert all(toy.n_layers % getattr(toy.attention, "path_length", 2) for toy in toys_of(KVPathConcat))


@dataclass(kw_only=True)
class Odd(AttentionStrategy):
    """A strategy with a field of its own, as a user's."""

    flavour: int

    def makes(self, layer: int) -> Mapping[str, Slot]:
        return {"k": Slot(1, self.flavour)}

    def heads(self, layer: int) -> Heads:
        return Heads(self.n_heads, self.flavour, self.flavour)

    def build(self, layer: int, backbone: object) -> None:  # type: ignore[override]
        raise NotImplementedError("which examples there are is found out without building any")


class OddWithExamples(Odd):
    """The same, covered."""

    @classmethod
    def examples(cls) -> list[AttentionStrategy]:
        return [cls(n_heads=3, flavour=2)]


def test_a_strategy_that_is_not_covered_is_named() -> None:
    assert Odd in concrete_strategies()
    with pytest.raises(UserError, match=r"Odd is not covered: .* for its field flavour; .*examples"):
        toys_of(Odd)
    (toy,) = toys_of(OddWithExamples)
    assert (toy.name, toy.attention) == ("OddWithExamples-1", OddWithExamples(n_heads=3, flavour=2))


def test_a_config_is_shrunk_around_its_attention() -> None:
    attention = GQA(n_heads=6, n_kv_heads=3, head_dim=4)
    first, *others = toys_of_config(Toy("large", attention, n_layers=40).config(d_model=48))
    assert (first.attention, first.n_layers, first.config().d_model) == (attention, 5, 10)
    assert others == toys_of(GQA)


def test_a_plan_for_one_depth_keeps_it() -> None:
    plan = CLA(n_heads=2, n_kv_heads=1, head_dim=4, owners=[0, 0, 2, 2, 2, 5, 5])
    assert toys_of_config(Toy("plan", plan, n_layers=7).config())[0].n_layers == 7


def test_rows_name_the_worst_toy_and_nan_fails() -> None:
    toys = [Toy(name, GQA(n_heads=1, n_kv_heads=1, head_dim=2)) for name in ("a", "b", "c")]
    found = {"a": 0.5, "b": 2.0, "c": 1.0}
    (row,) = run_parity(toys, [Route("made up", lambda toy: found[toy.name], 1.5)])
    assert (row.difference, row.toy.name, row.holds) == (2.0, "b", False)
    (row,) = run_parity(toys, [Route("made up", lambda toy: found[toy.name], 2.0)])
    assert row.holds
    found["c"] = float("nan")
    (row,) = run_parity(toys, [Route("made up", lambda toy: found[toy.name], 2.0)])
    assert (row.toy.name, row.holds) == ("c", False)
    with pytest.raises(AssertionError, match=r"made up: nan > 2 \(c\)"):
        check_parity(toys, [Route("made up", lambda toy: found[toy.name], 2.0)])
