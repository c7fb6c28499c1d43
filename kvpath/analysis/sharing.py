"""How ranks share out weights, gradients and moments, and what that leaves on each of them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvpath.analysis.training_memory import Exchange
from kvpath.errors import UserError

_DEEPSPEEDS = {
    "stage": "stage",
    "overlap_comm": "overlap_comm",
    "bucket_elements": "reduce_bucket_size",
    "live_elements": "stage3_max_live_parameters",
    "ahead_elements": "stage3_prefetch_bucket_size",
    "offload_optimizer": "offload_optimizer",
    "offload_parameters": "offload_param",
}
"""What fields of `Sharing` are called in DeepSpeed's own `zero_optimization`."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the worst moment of a step.

    Args:
        micro_batch: sequences that run together.
        accumulation: micro-batches of a step.
        checkpointing: whether blocks are run again in the backward pass instead of kept.
        weights: in the precision of the passes; with stage 3 this rank's part, and what is gathered at once.
        gradients: that are kept until the optimizer has used them.
        optimizer: moments, and with ZeRO weights in float32.
        buffers: what ranks exchange at once, and what DDP or a step of ZeRO copies beyond what the passes held.
        activations: all else that a micro-batch holds.
        host: bytes in the memory of the host instead.
    """

    micro_batch: int
    accumulation: int
    checkpointing: bool
    weights: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    host: int = 0

    @property
    def total(self) -> int:
        """On the device."""
        return self.weights + self.gradients + self.optimizer + self.buffers + self.activations


@dataclass(frozen=True)
class Sharing:
    """What the Trainer's strategy and precision decide of memory.

    Args:
        ranks: of the run.
        stage: of ZeRO; 0 for the whole model on each rank.
        precision: as the Trainer has it.
        gradients_apart: whether DDP's buckets are not the gradients themselves, as in Lightning's own `ddp`.
        bucket_elements: gradients exchanged at once.
        overlap_comm: whether there are two such buckets.
        live_elements: weights that stage 3 holds gathered at once.
        ahead_elements: weights that it gathers together before they are needed; the default is DeepSpeed's own.
        offload_optimizer: whether moments and weights in float32 are in the memory of the host.
        offload_parameters: whether the weights are too.

    Raises:
        UserError: every problem found, each naming the field and the value.
    """

    ranks: int = 1
    stage: int = 0
    precision: str = "32-true"
    gradients_apart: bool = False
    bucket_elements: int = 200_000_000
    overlap_comm: bool = True
    live_elements: int = 200_000_000
    ahead_elements: int = 50_000_000
    offload_optimizer: bool = False
    offload_parameters: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{self._named(name)} must be a whole number of at least {least}, got {value}"
            for name, least in {"bucket_elements": 1, "live_elements": 1, "ahead_elements": 0}.items()
            if not isinstance(value := getattr(self, name), int) or value < least
        ]
        if self.stage not in (0, 1, 2, 3):
            problems.append(f"{self._named('stage')} must be 1, 2 or 3, got {self.stage}")
        elif self.offload_parameters and self.stage != 3:
            problems.append(f"{self._named('offload_parameters')} needs stage 3, got stage {self.stage}")
        UserError.raise_all(problems)

    @classmethod
    def of(cls, trainer: Mapping[str, Any], ranks: int) -> "Sharing":
        """From the Trainer's part of a configuration, as plain values.

        Raises:
            UserError: every field of the strategy that is wrong.
        """
        precision = str(trainer.get("precision") or "32-true")
        strategy = trainer.get("strategy")
        name = str(strategy.get("class_path", "")) if isinstance(strategy, Mapping) else str(strategy)
        UserError.raise_all(
            [f"trainer.strategy {name} is none whose memory is known: -c hardware/single, ddp, zero1, zero2 or zero3"]
            * (name.rpartition(".")[2] not in ("None", "auto", "ddp", "DDP", "DDPStrategy", "ZeRO"))
            + [f"trainer.precision must be 32-true, bf16-mixed, bf16-true or 64-true, got {precision}"]
            * (re.search(r"(?<!bf)16", precision) is not None)
        )
        if not (isinstance(strategy, Mapping) and name.endswith("ZeRO")):
            apart = ranks > 1 and not name.endswith("meeting.DDP")
            return cls(ranks=ranks, precision=precision, gradients_apart=apart)
        given = {"stage": 2, **strategy.get("init_args", {})}
        over = (given.get("config") or {}).get("zero_optimization") or {}
        given |= {name: _plain(over[theirs]) for name, theirs in _DEEPSPEEDS.items() if theirs in over}
        return cls(ranks=ranks, precision=precision, **{name: given[name] for name in _DEEPSPEEDS if name in given})

    @staticmethod
    def _named(field: str) -> str:
        return f"trainer.strategy ZeRO: {field} (zero_optimization.{_DEEPSPEEDS[field]})"

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of the weights in the passes, and of their gradients."""
        if self.precision == "64-true":
            return torch.float64
        return torch.bfloat16 if self.precision == "bf16-true" or self._in_bf16_by_zero else torch.float32

    @property
    def autocast(self) -> torch.dtype | None:
        """Of products, if it is another one."""
        return torch.bfloat16 if self.precision == "bf16-mixed" and not self.stage else None

    @property
    def _in_bf16_by_zero(self) -> bool:
        return bool(self.stage) and self.precision.startswith("bf16")

    def gradients_held(self, accumulation: int) -> bool:
        """Whether all memory of the gradients is taken before a step's last pass, and not on its way."""
        if self.stage in (1, 2):
            return self.stage == 1 and accumulation > 1
        return accumulation > 1 or self.stage == 3 or self.ranks > 1  # DDP's buckets are the gradients, and stay

    def exchange(self, parameters: int) -> Exchange | None:
        """How gradients leave during a step's last backward pass; None if they stay, or have their place."""
        leave = self.stage == 2 or (self.stage == 1 and self.overlap_comm)
        return Exchange(self.bucket_elements, self._part_kept(parameters), self._buckets) if leave else None

    @property
    def _buckets(self) -> int:
        return 2 if self.overlap_comm and self.stage != 3 else 1

    def _part(self, parameters: int) -> int:
        return -(-parameters // self.ranks)

    def _part_kept(self, parameters: int) -> int:
        return 0 if self.offload_optimizer else self._part(parameters)

    def memory(
        self, parameters: int, largest: int, passes: int, micro_batch: int, accumulation: int, checkpointing: bool
    ) -> Memory:
        """What a rank holds.

        Args:
            parameters: of the model.
            largest: elements of its largest weight.
            passes: bytes of a micro-batch, as `pass_bytes` found them with `weight_dtype`, `autocast`,
                `gradients_held` and `exchange`.
            micro_batch: sequences in it.
            accumulation: micro-batches of a step.
            checkpointing: whether the passes ran with it.
        """
        kind = (micro_batch, accumulation, checkpointing)
        if not self.stage:
            return self._whole(parameters, passes, *kind)
        return self._by_zero(parameters, largest, passes, *kind)

    def checkpoint_bytes(self, parameters: int) -> int:
        """Of all files of one checkpoint: weights and two moments, and with ZeRO weights in float32 beside them."""
        size = self.weight_dtype.itemsize
        if not self.stage:
            return 3 * parameters * size
        return parameters * (12 + (size if self.stage < 3 else 0))

    def _whole(self, parameters: int, passes: int, micro_batch: int, accumulation: int, checkpointing: bool) -> Memory:
        weights = parameters * self.weight_dtype.itemsize
        activations = passes if self.gradients_held(accumulation) else max(0, passes - weights)
        # Before the second step's passes DDP orders its buckets anew: it makes others, and these are the gradients.
        buffers = max(0, weights - activations) if self.ranks > 1 else 0
        gradients = weights * (2 if self.gradients_apart and accumulation > 1 else 1)
        return Memory(micro_batch, accumulation, checkpointing, weights, gradients, 2 * weights, buffers, activations)

    def _by_zero(
        self, parameters: int, largest: int, passes: int, micro_batch: int, accumulation: int, checkpointing: bool
    ) -> Memory:
        size, part = self.weight_dtype.itemsize, self._part(parameters)
        optimizer, host = 12 * part, 0
        buckets = self._buckets * self.bucket_elements * size
        weights, live = parameters * size, 0
        exchange = self.exchange(parameters)
        made = exchange.part_elements * size if exchange else 0 if self.gradients_held(accumulation) else weights
        activations = max(0, passes - made - (exchange.elements * size if exchange else 0))
        held = {1: weights, 2: made, 3: 0 if self.offload_optimizer else part * size}[self.stage]
        gradients = made + (held if accumulation > 1 or self.stage == 3 else 0)
        if self.stage == 3:
            # The last that is gathered may go beyond; what is gathered together is there twice until all of it is used.
            bounds = (self.live_elements + largest, self.ahead_elements + largest)
            live = sum(min(parameters, bound) for bound in bounds) * size
            weights = (0 if self.offload_parameters else part * size) + live
            host += part * size if self.offload_parameters else 0
        if self.offload_optimizer:
            # Gradients in float32 too, and what carries them, or the updated weights, to and fro.
            one = largest * size if self.stage < 3 else 0
            collected = part * size if self.stage < 3 and accumulation > 1 else 0
            host += optimizer + 4 * part + part * size + one + collected
            optimizer, buckets = 0, buckets + one
        # After the passes a step copies this rank's gradients, once flat and once in float32; no weights are gathered.
        copies = part * size + (0 if size == 4 else 4 * part)
        in_step = part * size + copies if not self.offload_optimizer else 0
        buffers = buckets + max(0, in_step - (live + gradients + buckets + activations))
        return Memory(
            micro_batch, accumulation, checkpointing, weights, gradients, optimizer, buffers, activations, host
        )


def _plain(value: Any) -> Any:
    """Of DeepSpeed's configuration: where to offload to as whether to, null as no, 5e8 as the number it stands for."""
    if value is None or isinstance(value, Mapping):
        return (value or {}).get("device", "none") != "none"
    return int(value) if isinstance(value, float) and value.is_integer() else value
