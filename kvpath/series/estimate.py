"""`kvpath series plan`: every command, with what it takes of time, devices and disk."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvpath.analysis.audit import Audit, audit
from kvpath.analysis.run_plan import CHECKPOINTS_KEPT, Machine
from kvpath.analysis.sharing import Sharing
from kvpath.config import backbone_from
from kvpath.data.budget import Budget
from kvpath.errors import UserError
from kvpath.series.clock import spoken
from kvpath.series.jobs import Job
from kvpath.series.state import Progress


@dataclass(frozen=True)
class Estimate:
    """What one run takes.

    Args:
        tokens: of the run; None for an epoch of text whose length is not known here.
        steps: of the optimizer; None with `tokens`.
        seconds: on all devices; None if no rate was stated, or with `tokens`.
        devices: that run it.
        disk: bytes of the checkpoints it keeps at most.
    """

    tokens: int | None
    steps: int | None
    seconds: float | None
    devices: int
    disk: int

    @property
    def device_hours(self) -> float | None:
        """Hours of all devices together."""
        return None if self.seconds is None else self.seconds / 3600 * self.devices


@dataclass(frozen=True)
class Rate:
    """What is assumed of a device.

    Args:
        peak_flops: products, FLOPs/s.
        utilisation: the share of it that training reaches.
        tokens_per_second: measured on one device; goes before both.
        devices: of each run; None for what its configuration states, 1 where it states none.
    """

    peak_flops: float | None = None
    utilisation: float = 0.4
    tokens_per_second: float | None = None
    devices: int | None = None

    def machine(self, devices: int) -> Machine:
        """As `kvpath plan` has it.

        Raises:
            UserError: every number that is not positive.
        """
        return Machine(1, devices, 1, 0, self.peak_flops, self.utilisation, self.tokens_per_second)

    def describe(self) -> str:
        """What hours rest on, in words."""
        if self.tokens_per_second is not None:
            return f"{self.tokens_per_second:,.0f} tokens/s on one device, whatever the layout (--tokens_per_second)"
        if self.peak_flops is not None:
            return (
                f"{self.utilisation:.0%} of {self.peak_flops:.3g} FLOPs/s on each device (--peak_flops, --utilisation),"
                " the FLOPs of each layout being counted"
            )
        return "no rate was stated: hours need --peak_flops and --utilisation, or a measured --tokens_per_second"


def estimate(job: Job, progress: Progress, rate: Rate) -> Estimate:
    """What a fit takes.

    Raises:
        UserError: its configuration is wrong, or its batch does not divide by the devices; names the run.
    """
    values = progress.composed(job)
    devices = rate.devices or _stated_devices(values["trainer"])
    try:
        machine = rate.machine(devices)
        seq_len, budget = values["data"]["seq_len"], Budget(**values["data"]["budget"])
        sharing = Sharing.of(values["trainer"], devices)
        counted = _counted(json.dumps(values["model"]["backbone"], sort_keys=True), seq_len)
        # Without a number of tokens the steps are not known: any will do to check the batch.
        plan = Budget(**{**vars(budget), "tokens": budget.tokens or 1e18}).plan(seq_len, devices)
    except UserError as error:
        raise UserError(f"{job.directory}: {error}") from error
    known = budget.tokens is not None
    per_second = machine.tokens_per_second_of(counted.training_flops_per_token)
    return Estimate(
        tokens=plan.tokens if known else None,
        steps=plan.steps if known else None,
        seconds=None if per_second is None or not known else plan.tokens / (per_second * devices),
        devices=devices,
        disk=CHECKPOINTS_KEPT * sharing.checkpoint_bytes(counted.parameters),
    )


def plan_lines(progress: Progress, rate: Rate, workers: int = 1) -> Iterator[str]:
    """Each command after a line on what it takes, as a script for a shell; then the sums of what is left to do.

    Raises:
        UserError: every run whose configuration is wrong.
    """
    problems, lines, left = [], [], []
    for job in progress.jobs:
        state = progress.state(job)
        about = f"{state.word}: {state.detail}" if state.word == "changed" else state.word
        if job.kind == "fit":
            try:
                found = estimate(job, progress, rate)
            except UserError as error:
                problems.append(str(error))
                continue
            if state.word not in ("done", "diverged"):
                left.append(found)
            about = f"{_described(found)}; {about}"
        lines += [f"# {job.name}: {about}", f"kvpath {job.line(progress.study, progress.overrides)}"]
    UserError.raise_all(dict.fromkeys(problems))
    yield from lines
    yield f"# {len(left)} runs to train: {_summed(left, workers)}"
    yield f"# assumed: {rate.describe()}; validations and tests are not counted"


def _described(found: Estimate) -> str:
    parts = ["an epoch" if found.tokens is None else f"{found.tokens:,} tokens in {found.steps:,} steps"]
    if found.seconds is not None and found.device_hours is not None:
        parts += [f"{spoken(found.seconds)} on {found.devices}", f"{found.device_hours:,.2f} GPU-hours"]
    return ", ".join([*parts, f"checkpoints of {_gigabytes(found.disk)}"])


def _summed(left: list[Estimate], workers: int) -> str:
    parts = [f"{sum(found.tokens or 0 for found in left):,} tokens"]
    seconds = [found.seconds for found in left if found.seconds is not None]
    if seconds:
        parts.append(f"{sum(found.device_hours or 0 for found in left):,.2f} GPU-hours")
        parts.append(f"{spoken(sum(seconds))} one after another")
        if workers > 1:
            parts.append(f"{spoken(max(sum(seconds) / workers, *seconds, 0))} or more with {workers} workers")
    return ", ".join([*parts, f"checkpoints of {_gigabytes(sum(found.disk for found in left))}"])


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def _stated_devices(trainer: dict[str, Any]) -> int:
    devices = trainer.get("devices")
    count = len(devices) if isinstance(devices, list) else devices if isinstance(devices, int) and devices > 0 else 1
    return int(count) * int(trainer.get("num_nodes") or 1)


@cache
def _counted(backbone: str, seq_len: int) -> Audit:
    return audit(backbone_from(json.loads(backbone)), seq_len)
