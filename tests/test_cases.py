"""No strategy escapes the tests that hold for every one."""

import inspect

import kvpath.attention
from kvpath.attention import AttentionStrategy
from tests.cases import SHIPPED


def test_every_shipped_strategy_has_a_case() -> None:
    exported = [getattr(kvpath.attention, name) for name in kvpath.attention.__all__]
    concrete = {
        thing
        for thing in exported
        if isinstance(thing, type) and issubclass(thing, AttentionStrategy) and not inspect.isabstract(thing)
    }
    assert concrete
    assert concrete == {type(case.attention) for case in SHIPPED}


def test_names_of_cases_differ() -> None:
    names = [case.name for case in SHIPPED]
    assert len(set(names)) == len(names)
