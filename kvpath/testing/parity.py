"""The table: every route of every toy, its largest difference, its bound, its verdict."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvpath.testing import allocation, compiled, gradients, precision, routes, structure
from kvpath.testing.toys import Toy

EXACT = 1e-10
"""For float64, where only the order of sums may differ."""


@dataclass(frozen=True)
class Route:
    """One way of running a model, or one property of it."""

    name: str
    difference: Callable[[Toy], float]
    """0 where all is well."""

    bound: float = EXACT

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Row:
    """A route over several toys."""

    route: Route
    difference: float
    """The largest, NaN if one is."""

    toy: Toy
    """Where it is."""

    @property
    def holds(self) -> bool:
        """Whether it is within the bound."""
        return self.difference <= self.route.bound


ROUTES = (
    Route("one-shot prefill", routes.one_shot),
    Route("chunked prefill", routes.chunked),
    Route("token by token", routes.token_by_token),
    Route("left-padded batch, no cache", routes.padded_without_cache),
    Route("left-padded batch", routes.padded),
    Route("packed documents", routes.documents),
    Route("last positions only", routes.last_positions),
    Route("reordered and forked rows", routes.reordered),
    Route("saved, loaded, reset", routes.saved),
    Route("compact", routes.compact),
    Route("compact, padded and packed", routes.compact_padded),
    Route("activation checkpointing", gradients.checkpointed),
    Route("gradients of last positions", gradients.suffix),
    Route("gradients by differences", gradients.finite_differences, 1e-5),
    Route("layers alone", structure.layers_alone),
    Route("who depends on whom", structure.dependences, 0.0),
    Route("all positions shifted", structure.shifted, 1e-4),
    Route("allocated bytes, share off", allocation.bytes_beyond_the_layout, 0.01),
)
"""Differences of float64 logits and gradients from those of one pass without a cache, unless the bound says more."""

SLOW_ROUTES = (
    Route("bf16 cache, RMS error x", precision.cached_in_bf16, 2.0),
    Route("bf16 compact, RMS error x", precision.compact_in_bf16, 2.0),
    Route("compiled decoding", compiled.traced_decoding),
)
"""Those that take seconds a toy."""


def run_parity(toys: Sequence[Toy], chosen: Sequence[Route] = ROUTES) -> Iterator[Row]:
    """One row for each route, the worst over the toys, as they are done. What memory held before is NaN."""
    for route in chosen:
        found: list[tuple[float, Toy]] = []
        for toy in toys:
            with uninitialised_memory_is_nan():
                found.append((route.difference(toy), toy))
        yield Row(route, *max(found, key=lambda pair: float("inf") if pair[0] != pair[0] else pair[0]))


def check_parity(toys: Sequence[Toy], chosen: Sequence[Route] = ROUTES) -> None:
    """For tests.

    Raises:
        AssertionError: naming every route that is out of its bound, by how much, and the toy.
    """
    failed = [row for row in run_parity(toys, chosen) if not row.holds]
    lines = [f"{row.route}: {row.difference:.2g} > {row.route.bound:.2g} ({row.toy})" for row in failed]
    assert not failed, "\n".join(lines)


@contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    """Fill what torch allocates without a value, so that no test passes by luck of what was there."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
