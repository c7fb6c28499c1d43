"""Several processes that share the requests of lm-evaluation-harness, started by torchrun."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """What the harness asks of a model to share its requests among processes; alone, all of it does nothing."""

    _rank: int
    _world_size: int

    def meet(self) -> None:
        """Wait for the others that a launcher says there are; numbers go from CPU to CPU."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")
        if dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    def own_device(self, device: str | None) -> str | None:
        """The device of this process: one of its own, where several share a machine's.

        The harness says cuda:0 where nobody has said anything, so that without CUDA it cannot be meant.
        """
        if device is not None and not device.startswith("cuda"):
            return device
        if not torch.cuda.is_available():
            return None
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if self._world_size > 1 else device

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, (ranks, ...), on the CPU."""
        if self._world_size == 1:
            return tensor
        gathered = [torch.empty_like(tensor, device="cpu") for _ in range(self._world_size)]
        dist.all_gather(gathered, tensor.cpu())
        return torch.stack(gathered)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """The objects of all ranks on rank `dst`, None elsewhere."""
        if self._world_size == 1:
            return [obj]
        gathered = [None] * self._world_size if self._rank == dst else None
        dist.gather_object(obj, gathered, dst)
        return gathered

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self._world_size > 1:
            dist.barrier()
