"""Whether something fits into memory, asked before it is allocated."""

from collections.abc import Mapping
from pathlib import Path

import torch

from kvpath.analysis.allocation import cache_bytes
from kvpath.attention.layout import Layout
from kvpath.errors import UserError


def free_bytes(device: torch.device | str) -> int | None:
    """Bytes that can still be allocated on a device; None where nobody can say."""
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu":
        known = [count for count in (_machine_free(), group_free()) if count is not None]
        return min(known, default=None)
    return None


def refuse_what_does_not_fit(needed: int, device: torch.device | str, what: str, hint: str = "") -> None:
    """Stop before an allocation that cannot succeed.

    Raises:
        UserError: the device has fewer than `needed` bytes left; says how many `what` needs.
    """
    free = free_bytes(device)
    if free is not None and needed > free:
        raise UserError(f"{what} needs {_size(needed)}, and {device} has {_size(free)} free" + (hint and f": {hint}"))


def refuse_a_cache_that_does_not_fit(
    layout: Layout,
    batch: int,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device | str,
    slot_dtypes: Mapping[str, torch.dtype] | None = None,
    *,
    padded: bool = False,
    held: int = 0,
) -> None:
    """Stop before allocating a cache for `batch` rows of `tokens` tokens, of which `held` bytes are there already.

    Raises:
        UserError: it does not fit; says what it needs, what is free, and how many rows would fit.
    """
    needed = cache_bytes(layout, batch, tokens, dtype, slot_dtypes, padded=padded) - held
    fitting = (free_bytes(device) or 0) // cache_bytes(layout, 1, tokens, dtype, slot_dtypes, padded=padded)
    what = f"a cache of {batch:,} rows x {tokens:,} tokens in {str(dtype).removeprefix('torch.')}"
    refuse_what_does_not_fit(needed, device, what, f"{fitting:,} rows of that length fit")


def _machine_free() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if available is None else int(available) * 1024


def group_free(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the control group of this process, a job's or a container's, has left; file caches give way."""
    try:
        own = next(line for line in groups.read_text().splitlines() if line.startswith("0::"))
        folder = root / own.removeprefix("0::/")
        most = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, StopIteration):
        return None
    return int(most) - used + int(statistics.get("inactive_file", 0)) if most.isdigit() else None


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e7 else f"{count:,} bytes"
