"""The Trainer's strategy for DeepSpeed's ZeRO, on GPUs, and on CPU processes for trials and tests."""

import errno
import logging
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.strategies.deepspeed import DeepSpeedStrategy
from torch.nn import Module

from kvpath.errors import UserError
from kvpath.pieces import merged
from kvpath.training.deepspeed.directory import LATEST, TAG, ShardedCheckpoint, Sharding, is_sharded
from kvpath.training.deepspeed.mistakes import check_can_be_sharded, check_fields, check_installed
from kvpath.training.deepspeed.stepping import EngineStepping
from kvpath.training.deepspeed.taking import take
from kvpath.training.meeting import MeetsInTime
from kvpath.training.module import check_shapes, shapes_of
from kvpath.training.stored_config import read_checkpoint
from kvpath.training.whole_files import remove, write_whole

WHOLE = ("state_dict", "optimizer_states")
"""What of a checkpoint no rank holds whole."""


class ZeRO(MeetsInTime, DeepSpeedStrategy):
    """Trains with ZeRO stages 1 to 3: the same gradients as with DDP, within rounding."""

    stepping = EngineStepping

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        overlap_comm: bool = True,
        bucket_elements: int = 200_000_000,
        live_elements: int = 200_000_000,
        timeout_minutes: float = 30.0,
        config: dict[str, Any] | None = None,
    ) -> None:
        """What is shared out, and how.

        Args:
            stage: 1 shares out the optimizer's state, 2 the gradients too, 3 the weights too.
            offload_optimizer: Keep the optimizer's state, and update, in the memory of the host.
            offload_parameters: Keep the weights in the memory of the host while they are not needed; stage 3 only.
            overlap_comm: Exchange gradients while the backward pass goes on.
            bucket_elements: Gradients exchanged at once; a bucket, or two with overlap_comm, takes device memory.
            live_elements: Weights that stage 3 holds whole at once; the others are gathered when they are needed.
            timeout_minutes: How long a rank waits for the others before it gives up.
            config: More of DeepSpeed's configuration, as in its JSON; it goes over what follows from the fields above.

        Raises:
            UserError: naming the field and the value, or how to install DeepSpeed.
        """
        config = config or {}
        check_fields(stage, offload_parameters, bucket_elements, live_elements, timeout_minutes, config)
        check_installed()
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it wonders aloud
        zero: dict[str, Any] = {
            "stage": stage,
            "overlap_comm": overlap_comm,
            "contiguous_gradients": True,
            "reduce_bucket_size": bucket_elements,
            "allgather_bucket_size": bucket_elements,
        }
        if stage == 3:
            zero |= {"stage3_max_live_parameters": live_elements, "stage3_max_reuse_distance": live_elements}
        if offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        if offload_parameters:
            zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        plain = {
            "zero_optimization": zero,
            # torch's fused AdamW runs on the host too, and resumes bitwise, which DeepSpeed's own does not.
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "train_micro_batch_size_per_gpu": 1,
        }
        super().__init__(config=merged(plain, config), timeout=timedelta(minutes=timeout_minutes))
        self.stage = stage
        _log_to_standard_error()

    @property
    def shards_weights(self) -> bool:
        """Whether no rank holds all weights, so that every rank must take part in whatever runs the model."""
        return self.zero_stage_3

    def setup_environment(self) -> None:
        """As Lightning does for GPUs, and over gloo for CPU processes.

        Raises:
            UserError: DeepSpeed has chosen another kind of device.
        """
        from deepspeed.accelerator import get_accelerator

        assert self.accelerator is not None
        kind = self.root_device.type
        if get_accelerator().device_name() != kind:
            raise UserError(
                f"trainer.accelerator is {kind}, but DeepSpeed has chosen {get_accelerator().device_name()}:"
                f" set DS_ACCELERATOR={kind} in the environment"
            )
        if kind != "cpu":
            super().setup_environment()
            return
        assert self.parallel_devices is not None
        self.parallel_devices = [torch.device("cpu", index) for index in range(len(self.parallel_devices))]
        _use_gloo_alone()
        super(DeepSpeedStrategy, self).setup_environment()

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        """The module's own: it calls the engine for each micro-batch, which must not be called around them."""
        assert self.lightning_module is not None
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*arguments, **options)

    @property
    def sharding(self) -> Sharding:
        """How this run shares out its state."""
        ranks = self.num_processes * self.num_nodes
        return Sharding(self.stage, ranks, bf16="bf16" in str(self.precision_plugin.precision))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Every rank writes its own part; nothing is gathered.

        Raises:
            OSError: on all ranks, what the disk of one said.
        """
        path = Path(self.broadcast(filepath))
        files = self.deepspeed_engine.checkpoint_engine
        files.fault = None
        if self.is_global_zero:
            files.fault = _fault_of(lambda: _make_anew(path))
        self._raise_together(files.fault, path)
        state = {key: value for key, value in checkpoint.items() if key not in WHOLE}
        self.deepspeed_engine.save_checkpoint(str(path), tag=TAG, client_state=state, save_latest=False)
        self._raise_together(files.fault, path)
        if self.is_global_zero:
            files.fault = _fault_of(lambda: write_whole(path / LATEST, TAG))
        self._raise_together(files.fault, path)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Take weights, moments and the state of the Trainer from a checkpoint of any strategy and number of ranks.

        Where this run shares its state out as the one that saved it, DeepSpeed reads it, and it goes on bit for bit.

        Raises:
            UserError: it is incomplete, or of another model.
        """
        path = Path(checkpoint_path)
        assert self.lightning_module is not None
        ours = whole_shapes_of(self.lightning_module)
        if is_sharded(path):
            sharded = ShardedCheckpoint.open(path)
            check_shapes(ours, sharded.shapes, path)
            if sharded.sharding == self.sharding:
                return super().load_checkpoint(path, weights_only)
        else:
            check_shapes(ours, shapes_of(read_checkpoint(path)["state_dict"]), path)
        stored = read_checkpoint(path)
        take(self.deepspeed_engine, stored, self._in_order)
        return {key: value for key, value in stored.items() if key not in WHOLE}

    def go_back_to(self, path: Path) -> None:
        """Take weights and moments from a checkpoint of this very run."""
        self.load_checkpoint(path)

    def _raise_together(self, fault: OSError | None, path: Path) -> None:
        number = fault.errno if fault is not None and fault.errno is not None else errno.EIO if fault is not None else 0
        worst = int(self.reduce(torch.tensor(number, device=self.root_device), reduce_op="max"))
        if worst:
            raise OSError(worst, os.strerror(worst), str(path)) from fault

    def _setup_model_and_optimizer(self, model: Module, *arguments: Any) -> Any:
        from kvpath.training.deepspeed.files import plain_files

        engine, optimizer = super()._setup_model_and_optimizer(model, *arguments)
        engine.checkpoint_engine = plain_files(engine.optimizer)
        engine._copy_recovery_script = lambda _: None  # `kvpath export` does what it would do
        return engine, optimizer

    def _format_batch_size_and_grad_accum_config(self) -> None:
        assert isinstance(self.config, dict)
        module = self.lightning_module
        # DeepSpeed's own default would clip at 1.
        limit = getattr(getattr(module, "optimizer_config", None), "clip_norm", None)
        self.config["gradient_clipping"] = limit or 0.0
        super()._format_batch_size_and_grad_accum_config()

    def _init_optimizers(self) -> Any:
        optimizer, scheduler = super()._init_optimizers()
        check_can_be_sharded(optimizer, self.stage)
        assert self.lightning_module is not None
        names = {id(parameter): name for name, parameter in self.lightning_module.named_parameters()}
        self._in_order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        return optimizer, scheduler


def whole_shapes_of(module: Module) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, tied ones too, whatever part of it this rank has."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in named}


def _make_anew(path: Path) -> None:
    remove(path)
    (path / TAG).mkdir(parents=True)


def _fault_of(write: Callable[[], object]) -> OSError | None:
    try:
        write()
    except OSError as fault:
        return fault
    return None


def _log_to_standard_error() -> None:
    """Standard output is for results."""
    for handler in logging.getLogger("DeepSpeed").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)


def _use_gloo_alone() -> None:
    """Without the operation in shared memory that DeepSpeed would compile: it needs a compiler, and is no faster."""
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False
