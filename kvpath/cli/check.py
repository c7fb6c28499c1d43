"""``kvpath check``: proves that a layout gives the same numbers by every way of running it."""

from collections.abc import Sequence

from kvpath.cli.arguments import Arguments
from kvpath.config import load_config
from kvpath.testing import (
    ROUTES,
    SLOW_ROUTES,
    Route,
    Row,
    Toy,
    concrete_strategies,
    run_parity,
    toys_of,
    toys_of_config,
)
from kvpath.testing.allocation import TOKENS, decoded_bytes


def check_command(argv: list[str]) -> int:
    """Run ``kvpath check`` with the arguments after the subcommand; returns 0 if every route holds, else 1.

    Raises:
        UserError: a piece or an option is wrong, or a strategy has fields for which no small values are known.
    """
    parser = Arguments(
        "check",
        "Runs small models of a configuration's attention, as it is configured and in variants, by every route: without"
        " and through a cache, in chunks, token by token, padded, compact; float64. Without -c, of every strategy.",
        "Other options override the configuration, such as --model.backbone.n_layers 6.",
    )
    parser.add_argument("-c", "--config", action="append", default=[], metavar="PIECE", help="a file or shipped piece")
    parser.add_argument("--slow", action="store_true", help="also in bfloat16, and compiled")
    args, overrides = parser.parse_known_args(argv)
    if args.config or overrides:
        toys = toys_of_config(load_config(*args.config, overrides=overrides).backbone)
    else:
        toys = [toy for strategy in concrete_strategies() for toy in toys_of(strategy)]
    print(f"{len(toys)} models: {', '.join(map(str, toys))}\n")
    holds = _print_rows(toys, (*ROUTES, *SLOW_ROUTES) if args.slow else ROUTES)
    taken, stated, peak = decoded_bytes(toys[0])
    print(
        f"\n{toys[0]} in a cache of {TOKENS:,} tokens: {stated:,} bytes by its layout, {taken:,} taken by all live"
        f" tensors, {peak:,} more at the peak of a step"
    )
    return 0 if holds else 1


def _print_rows(toys: Sequence[Toy], routes: Sequence[Route]) -> bool:
    """Each row as soon as it is known; whether all hold."""
    width = max(len(str(route)) for route in routes)
    print(f"{'route':<{width}}  {'difference':>10}  {'bound':>7}  verdict")
    holds = True
    for row in run_parity(toys, routes):
        holds &= row.holds
        print(f"{row.route!s:<{width}}  {row.difference:>10.1e}  {row.route.bound:>7.0e}  {_verdict(row)}", flush=True)
    return holds


def _verdict(row: Row) -> str:
    return "holds" if row.holds else f"FAILS for {row.toy}"
