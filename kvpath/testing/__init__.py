"""Proves that a strategy gives the same numbers by every way of running it: `kvpath check`, and for tests of your own.

    from kvpath.testing import check_parity, toys_of

    check_parity(toys_of(MyStrategy))

`toys` makes small models of a strategy, `routes`, `gradients`, `structure`, `precision`, `allocation` and `compiled`
hold the comparisons, and `parity` the table of them.
"""

from kvpath.testing.parity import ROUTES, SLOW_ROUTES, Route, Row, check_parity, run_parity
from kvpath.testing.toys import Toy, concrete_strategies, tokens, toys_of, toys_of_config

__all__ = [
    "ROUTES",
    "SLOW_ROUTES",
    "Route",
    "Row",
    "Toy",
    "check_parity",
    "concrete_strategies",
    "run_parity",
    "tokens",
    "toys_of",
    "toys_of_config",
]
