"""How ranks share out weights, gradients and moments, and what that leaves on each of them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from kvpath.analysis.training_memory import Exchange

_GATHERED_AHEAD = 50_000_000
"""Weights that DeepSpeed's stage 3 gathers before they are needed, by its own default."""


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
        buffers: what ranks exchange at once, and what else a step of ZeRO copies.
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
        bucket_elements: gradients exchanged at once.
        overlap_comm: whether there are two such buckets.
        live_elements: weights that stage 3 holds gathered at once.
        offload_optimizer: whether moments and weights in float32 are in the memory of the host.
        offload_parameters: whether the weights are too.
    """

    ranks: int = 1
    stage: int = 0
    precision: str = "32-true"
    bucket_elements: int = 200_000_000
    overlap_comm: bool = True
    live_elements: int = 200_000_000
    offload_optimizer: bool = False
    offload_parameters: bool = False

    @classmethod
    def of(cls, trainer: Mapping[str, Any], ranks: int) -> "Sharing":
        """From the Trainer's part of a configuration, as plain values."""
        strategy = trainer.get("strategy")
        given: Mapping[str, Any] = {}
        if isinstance(strategy, Mapping) and str(strategy.get("class_path", "")).endswith("ZeRO"):
            given = {"stage": 2, **strategy.get("init_args", {})}
        own = {name: value for name, value in given.items() if name in {field.name for field in fields(cls)}}
        return cls(ranks=ranks, precision=str(trainer.get("precision") or "32-true"), **own)

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
        return Exchange(self.bucket_elements, self._part_kept(parameters)) if leave else None

    def _part(self, parameters: int) -> int:
        return -(-parameters // self.ranks)

    def _part_kept(self, parameters: int) -> int:
        return 0 if self.offload_optimizer else self._part(parameters)

    def memory(self, parameters: int, passes: int, micro_batch: int, accumulation: int, checkpointing: bool) -> Memory:
        """What a rank holds.

        Args:
            parameters: of the model.
            passes: bytes of a micro-batch, as `pass_bytes` found them with `weight_dtype`, `autocast`,
                `gradients_held` and `exchange`.
            micro_batch: sequences in it.
            accumulation: micro-batches of a step.
            checkpointing: whether the passes ran with it.
        """
        kind = (micro_batch, accumulation, checkpointing)
        return (self._by_zero if self.stage else self._whole)(parameters, passes, *kind)

    def checkpoint_bytes(self, parameters: int) -> int:
        """Of all files of one checkpoint: weights and two moments, and with ZeRO weights in float32 beside them."""
        size = self.weight_dtype.itemsize
        if not self.stage:
            return 3 * parameters * size
        return parameters * (12 + (size if self.stage < 3 else 0))

    def _whole(self, parameters: int, passes: int, micro_batch: int, accumulation: int, checkpointing: bool) -> Memory:
        weights = parameters * self.weight_dtype.itemsize
        activations = passes if self.gradients_held(accumulation) else max(0, passes - weights)
        return Memory(micro_batch, accumulation, checkpointing, weights, weights, 2 * weights, 0, activations)

    def _by_zero(
        self, parameters: int, passes: int, micro_batch: int, accumulation: int, checkpointing: bool
    ) -> Memory:
        size, part = self.weight_dtype.itemsize, self._part(parameters)
        optimizer, host = 12 * part, 0
        buckets = self.bucket_elements * size * (1 + self.overlap_comm)
        weights = parameters * size
        exchange = self.exchange(parameters)
        made = exchange.part_elements * size if exchange else 0 if self.gradients_held(accumulation) else weights
        activations = max(0, passes - made)
        held = {1: weights, 2: made, 3: 0 if self.offload_optimizer else part * size}[self.stage]
        gradients = made + (held if accumulation > 1 or self.stage == 3 else 0)
        if self.stage == 3:
            live = min(parameters, self.live_elements) + min(parameters, _GATHERED_AHEAD)
            weights = (0 if self.offload_parameters else part * size) + live * size
            buckets = self.bucket_elements * size
            host += part * size if self.offload_parameters else 0
        if self.offload_optimizer:
            host += optimizer + 4 * part
            optimizer = 0
        # After the passes a step copies this rank's gradients, once flat and once in float32.
        copies = part * size + (0 if size == 4 else 4 * part)
        in_step = part * size + copies if not self.offload_optimizer else 0
        buffers = buckets + max(0, in_step - (gradients + buckets + activations))
        return Memory(
            micro_batch, accumulation, checkpointing, weights, gradients, optimizer, buffers, activations, host
        )
