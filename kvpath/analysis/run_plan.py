"""What a run needs of machines: memory of a rank by part, the micro-batch to use, time, and the size of checkpoints."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from kvpath.analysis.audit import audit, on_meta
from kvpath.analysis.sharing import Memory, Sharing
from kvpath.analysis.training_memory import pass_bytes
from kvpath.data.budget import Budget, Plan
from kvpath.errors import UserError
from kvpath.model.config import BackboneConfig


@dataclass(frozen=True)
class Machine:
    """What a run is given.

    Args:
        nodes: machines.
        devices: GPUs, or processes on CPUs, of each.
        memory: bytes of a device.
        reserve: bytes of it that tensors cannot have: the driver's context, workspaces of kernels, fragments.
        peak_flops: products of one device, FLOPs/s at the precision of the run.
        utilisation: the share of it that training is expected to reach (MFU).
        tokens_per_second: what one device was measured to train; goes before the two others.

    Raises:
        UserError: every problem found, each naming the field and the value.
    """

    nodes: int
    devices: int
    memory: int
    reserve: int = 0
    peak_flops: float | None = None
    utilisation: float = 0.4
    tokens_per_second: float | None = None

    def __post_init__(self) -> None:
        positive = ("nodes", "devices", "memory", "peak_flops", "tokens_per_second")
        problems = [
            f"{name} must be positive and finite, got {getattr(self, name)}"
            for name in positive
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf
        ]
        if not 0 < self.utilisation <= 1:
            problems.append(f"utilisation must be above 0 and at most 1, got {self.utilisation}")
        if not 0 <= self.reserve < self.memory:
            problems.append(f"reserve must be less than memory {self.memory}, got {self.reserve}")
        UserError.raise_all(problems)

    @property
    def ranks(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices

    @property
    def room(self) -> int:
        """Bytes of a device that tensors can have."""
        return self.memory - self.reserve

    def tokens_per_second_of(self, training_flops: float) -> float | None:
        """What one device trains of a model with so many FLOPs a token; None if nothing was stated."""
        if self.tokens_per_second is not None or self.peak_flops is None:
            return self.tokens_per_second
        return self.peak_flops * self.utilisation / training_flops


CHECKPOINTS_KEPT = 3
"""last, previous and best; while one is written, there is one more."""


@dataclass(frozen=True)
class StagePlan:
    """One stage of a study on a machine.

    Args:
        name: of the stage.
        parameters: of the model.
        plan: steps and how they are made up, with the micro-batch to use.
        best: what to run: the largest micro-batch that fits, with blocks kept if that is possible at all.
        options: the largest micro-batch that fits with blocks kept, and with them run again; one sequence if none does.
        fits: whether `best` does.
        tokens_per_second: of all devices; None if no rate was stated.
        checkpoint: bytes of all files of one.
    """

    name: str
    parameters: int
    plan: Plan
    best: Memory
    options: tuple[Memory, ...]
    fits: bool
    tokens_per_second: float | None
    checkpoint: int

    @property
    def seconds(self) -> float | None:
        """Of the whole stage."""
        return None if self.tokens_per_second is None else self.plan.tokens / self.tokens_per_second

    @property
    def device_hours(self) -> float | None:
        """Hours of all devices together."""
        return None if self.seconds is None else self.seconds / 3600 * self.plan.world_size

    @property
    def disk(self) -> int:
        """Bytes of all checkpoints at most: while one is written."""
        return (CHECKPOINTS_KEPT + 1) * self.checkpoint


@dataclass(frozen=True)
class Total:
    """Stages one after another.

    Args:
        tokens: of all.
        seconds: on all devices; None if no rate was stated.
        device_hours: hours of all devices together; None with `seconds`.
        disk: bytes of all checkpoints at most, those of earlier stages being kept.
    """

    tokens: int
    seconds: float | None
    device_hours: float | None
    disk: int

    @classmethod
    def of(cls, stages: Sequence[StagePlan]) -> "Total":
        """The sums."""
        sizes = [stage.checkpoint for stage in stages]
        return cls(
            tokens=sum(stage.plan.tokens for stage in stages),
            seconds=_sum(stage.seconds for stage in stages),
            device_hours=_sum(stage.device_hours for stage in stages),
            disk=CHECKPOINTS_KEPT * sum(sizes) + max(sizes),
        )


def _sum(amounts: Iterable[float | None]) -> float | None:
    known = list(amounts)
    return None if None in known else sum(amount for amount in known if amount is not None)


def memory_of(
    config: BackboneConfig,
    parameters: int,
    sharing: Sharing,
    micro_batch: int,
    seq_len: int,
    accumulation: int = 1,
    checkpointing: bool = False,
) -> Memory:
    """What a rank holds at the worst moment of a step.

    Args:
        config: the model, its widths solved.
        parameters: how many it has.
        sharing: how the ranks share weights, gradients and moments out.
        micro_batch: sequences that run together.
        seq_len: tokens in a sequence.
        accumulation: micro-batches of a step.
        checkpointing: whether blocks are run again in the backward pass instead of kept.
    """
    passes = pass_bytes(
        config,
        micro_batch,
        seq_len,
        weights=sharing.weight_dtype,
        autocast=sharing.autocast,
        activation_checkpointing=checkpointing,
        gradients_held=sharing.gradients_held(accumulation),
        exchange=sharing.exchange(parameters),
    )
    largest = max(parameter.numel() for parameter in on_meta(config).parameters())
    return sharing.memory(parameters, largest, passes, micro_batch, accumulation, checkpointing)


def plan_stage(
    name: str, config: BackboneConfig, budget: Budget, seq_len: int, sharing: Sharing, machine: Machine
) -> StagePlan:
    """Plan one stage.

    Args:
        name: what to call it.
        config: the model, its widths solved.
        budget: tokens and global batch; its micro-batch is chosen anew.
        seq_len: tokens in a sequence.
        sharing: how the ranks share weights, gradients and moments out.
        machine: what there is.

    Raises:
        UserError: the global batch does not divide by the ranks.
    """
    whole = replace(budget, micro_batch=1).plan(seq_len, machine.ranks)
    counted = audit(config, seq_len, name)

    @cache
    def memory(micro_batch: int, checkpointing: bool) -> Memory:
        accumulation = whole.sequences_per_rank // micro_batch
        return memory_of(config, counted.parameters, sharing, micro_batch, seq_len, accumulation, checkpointing)

    micro_batches = [m for m in range(1, whole.sequences_per_rank + 1) if whole.sequences_per_rank % m == 0]
    options = tuple(_largest(lambda m: memory(m, again), micro_batches, machine.room) for again in (False, True))  # noqa: B023
    best = next((option for option in options if option.total <= machine.room), options[-1])
    plan = replace(budget, micro_batch=best.micro_batch).plan(seq_len, machine.ranks)
    rate = machine.tokens_per_second_of(counted.training_flops_per_token)
    if rate is not None and machine.tokens_per_second is None and best.checkpointing:
        rate *= 3 / 4  # a forward pass more
    return StagePlan(
        name=name,
        parameters=counted.parameters,
        plan=plan,
        best=best,
        options=options,
        fits=best.total <= machine.room,
        tokens_per_second=None if rate is None else rate * machine.ranks,
        checkpoint=sharing.checkpoint_bytes(counted.parameters),
    )


def _largest(memory: Callable[[int], Memory], micro_batches: Sequence[int], room: int) -> Memory:
    """The last that fits, by halving; the first if none does."""
    low, high = 0, len(micro_batches)
    while high - low > 1:
        middle = (low + high) // 2
        if memory(micro_batches[middle]).total <= room:
            low = middle
        else:
            high = middle
    return memory(micro_batches[low])
