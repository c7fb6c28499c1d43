"""What this machine can do, and how busy others keep it: measured, to be set beside what else is measured."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

QUIET = 0.25
"""Cores that others may use while we measure."""

PRODUCTS = ((2048, 2048, 2048), (1024, 512, 2048), (1024, 2048, 512))
"""Matrix products (M, K, N) whose best rate is the machine's."""

VECTOR_PRODUCTS = ((2048, 2048), (2048, 512), (512, 2048), (50304, 512))
"""Matrices that meet one vector; the best rate is the machine's bandwidth."""

OUT_OF_CACHE = 2**28
"""Bytes that are read in turn, so that they come from memory."""


@dataclass(frozen=True)
class Machine:
    """The best rates that were reached in one dtype."""

    bytes_per_s: float
    """Read from memory by products of matrices with one vector."""

    flops_per_s: float
    """Of matrix products, a multiply-add being 2."""

    sum_bytes_per_s: float
    """Read by a sum, which does next to nothing with what it reads."""

    @classmethod
    def measured(cls, dtype: torch.dtype, seconds: float = 1.0, small: bool = False) -> "Machine":
        """Try several shapes, each for so long; small ones are for tests alone."""
        share = 64 if small else 1
        pool = OUT_OF_CACHE // (share * share)
        products = [tuple(size // share for size in shape) for shape in PRODUCTS]
        matrices = [(max(1, rows // share), columns) for rows, columns in VECTOR_PRODUCTS]
        return cls(
            max(vector_rate(*shape, pool, dtype, seconds) for shape in matrices),
            max(product_rate(m, k, n, dtype, seconds) for m, k, n in products),
            read_rate(pool, dtype, seconds),
        )


def product_rate(m: int, k: int, n: int, dtype: torch.dtype, seconds: float) -> float:
    """FLOP/s of the product of two matrices, (M, K) and (K, N), at best."""
    left, right = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    return 2 * m * k * n / min(time_steps(lambda: F.linear(left, right), seconds))


def vector_rate(rows: int, columns: int, pool: int, dtype: torch.dtype, seconds: float) -> float:
    """Bytes/s that products of matrices, which fill `pool` bytes together, with one vector read at best."""
    size = rows * columns * dtype.itemsize
    matrices = [torch.randn(rows, columns).to(dtype) for _ in range(max(1, pool // size))]
    vector = torch.randn(1, columns).to(dtype)

    def step() -> None:
        for matrix in matrices:
            F.linear(vector, matrix)

    return len(matrices) * size / min(time_steps(step, seconds))


def read_rate(pool: int, dtype: torch.dtype, seconds: float) -> float:
    """Bytes/s that a sum over `pool` bytes reads at best."""
    values: Tensor = torch.zeros(pool // dtype.itemsize, dtype=dtype)
    return pool / min(time_steps(values.sum, seconds))


def time_steps(step: Callable[[], object], seconds: float) -> list[float]:
    """The seconds of each step, after one that is not timed: for so long, but at least two."""
    step()
    times: list[float] = []
    while len(times) < 2 or sum(times) < seconds:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def largest_costs(step: Callable[[], object], count: int, always: str | None = None) -> dict[str, float]:
    """The operations that one step spends most of its own time in, with their shares.

    Args:
        step: what to run, once.
        count: how many operations.
        always: those whose names begin so come beside these.
    """
    with torch.profiler.profile() as profile:
        step()
    averages = sorted(profile.key_averages(), key=lambda entry: -entry.self_cpu_time_total)
    total = sum(entry.self_cpu_time_total for entry in averages)
    kept = [
        entry for i, entry in enumerate(averages) if i < count or always is not None and entry.key.startswith(always)
    ]
    return {entry.key: round(entry.self_cpu_time_total / total, 4) for entry in kept}


class OutOfTime(BaseException):
    """Raised by `time_limit`; no `Exception`, which a compiler would take for a fault of what it compiles."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in what takes longer; in the main thread alone."""

    def stop(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    # Again after a second: what is raised in a finaliser is lost.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def busy_cores(seconds: float = 1.0) -> float:
    """Cores that other processes keep busy while this one waits."""
    before = _cpu_times()
    time.sleep(seconds)
    idle, total = (after - start for after, start in zip(_cpu_times(), before, strict=True))
    return (os.cpu_count() or 1) * (1 - idle / max(total, 1))


def _cpu_times() -> tuple[int, int]:
    """Idle and total ticks of all cores since the machine started."""
    with open("/proc/stat", encoding="ascii") as lines:
        ticks = [int(number) for number in lines.readline().split()[1:]]
    return ticks[3] + ticks[4], sum(ticks)
