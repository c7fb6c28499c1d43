"""A checkpoint that ranks wrote together as a directory, read on any number of ranks and without DeepSpeed.

| file in `checkpoint/` | holds |
|---|---|
| mp_rank_00_model_states.pt | stages 1 and 2: weights in the precision of the pass, and the state of the Trainer |
| zero_pp_rank_R_mp_rank_00_model_states.pt | stage 3: the state of the Trainer, by every rank |
| zero_pp_rank_R_mp_rank_00_optim_states.pt | a rank's part of the weights in float32, and of their moments |

The names of the last begin with `bf16_` if the pass was in bfloat16. A file `latest` says that all of them are whole.
"""

import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpath.errors import UserError

TAG, LATEST = "checkpoint", "latest"

_OF_DEEPSPEED = """
module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler
checkpoint_parallel_dimensions data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size
mp_world_size ds_config ds_version
""".split()


@dataclass(frozen=True)
class Sharding:
    """How a checkpoint is cut."""

    stage: int
    ranks: int
    bf16: bool

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        return f"{ranks} with ZeRO stage {self.stage} in {'bf16' if self.bf16 else 'fp32'}"


class ShardedCheckpoint:
    """A directory; its tensors are mapped, and read when they are asked for."""

    @classmethod
    def open(cls, path: Path) -> "ShardedCheckpoint":
        """Look at all files, and read the first.

        Raises:
            Damaged: a file is missing, or cannot be read.
        """
        from kvpath.training.stored_config import Damaged  # which needs this file

        try:
            return cls(path)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).split("\n")[0].split(". ")[0]
            raise Damaged(f"{path} is damaged, or no checkpoint of kvpath: {reason}") from error

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / LATEST).is_file():
            raise FileNotFoundError(f"{LATEST} is missing, so it was not written to its end")
        names = [file.name for file in (path / TAG).iterdir()]
        alone = "mp_rank_00_model_states.pt" in names
        self._states = self._load("mp_rank_00_model_states.pt" if alone else _states_of(0))
        try:
            stage, ranks = self._states["ds_config"]["zero_optimization"]["stage"], self._states["dp_world_size"]
        except (KeyError, TypeError) as error:
            raise pickle.UnpicklingError(f"{TAG} holds no states of ZeRO") from error
        self.sharding = Sharding(int(stage), int(ranks), bf16=any(name.startswith("bf16_") for name in names))
        for name in [*self._parts, *([] if alone else map(_states_of, range(ranks)))]:
            # What closes such a file stands at its end.
            if not zipfile.is_zipfile(path / TAG / name):
                raise FileNotFoundError(f"{TAG}/{name} is {'cut off' if name in names else 'missing'}")

    @property
    def trainer_state(self) -> dict[str, Any]:
        """What the Trainer and its callbacks stored, as in a checkpoint that is a file, without weights and moments."""
        return {key: value for key, value in self._states.items() if key not in _OF_DEEPSPEED}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight, tied ones too."""
        own = {name: tuple(shape) for group in self._states["param_shapes"] for name, shape in group.items()}
        return own | {copy: own[of] for copy, of in self._tied.items()}

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The weights in float32, under the names of the module's `state_dict`."""
        return _Whole(self)

    def whole(self, name: str) -> Tensor:
        """One weight, put together from the parts of all ranks."""
        shape = self.shapes[name]
        name = self._tied.get(name, name)
        cut = self._cut_by_parameter if self.sharding.stage == 3 else self._cut_by_group
        return cut(name, math.prod(shape)).view(shape)

    def _cut_by_parameter(self, name: str, size: int) -> Tensor:
        """Stage 3: of every parameter each rank has an equal part, the last one padded; one after the other."""
        start, part = self._offsets[name], math.ceil(size / self.sharding.ranks)
        return torch.cat([flat[start : start + part] for (flat,) in self._flat])[:size]

    def _cut_by_group(self, name: str, size: int) -> Tensor:
        """Stages 1 and 2: the parameters of a group one after the other, cut into one part for each rank."""
        group = next(i for i, shapes in enumerate(self._states["param_shapes"]) if name in shapes)
        found, start = [], self._offsets[name]
        for parts in self._flat:
            found.append(parts[group][start : start + size])
            size -= len(found[-1])
            start = max(0, start - len(parts[group]))
        return torch.cat(found)

    @cached_property
    def _offsets(self) -> dict[str, int]:
        """Where each parameter begins: in its group, or with stage 3 in all that a rank has."""
        offsets, at = {}, 0
        for i, shapes in enumerate(self._states["param_shapes"]):
            if self.sharding.stage != 3:
                at = 0
            paddings = self._paddings[i] if self._paddings else [0] * len(shapes)
            for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
                offsets[name] = at
                size = math.prod(shape)
                at += math.ceil(size / self.sharding.ranks) if self.sharding.stage == 3 else size + padding
        return offsets

    @property
    def _tied(self) -> dict[str, str]:
        return dict(self._states["shared_params"])

    @property
    def _parts(self) -> list[str]:
        prefix = "bf16_" if self.sharding.bf16 else ""
        return [f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(self.sharding.ranks)]

    @cached_property
    def _optimizers(self) -> list[dict[str, Any]]:
        return [self._load(name)["optimizer_state_dict"] for name in self._parts]

    @property
    def _paddings(self) -> list[list[int]] | None:
        return None if self.sharding.stage == 3 else self._optimizers[0].get("param_alignment_paddings")

    @cached_property
    def _flat(self) -> list[list[Tensor]]:
        """Each rank's weights: one vector a group; with stage 3 one of all."""
        if self.sharding.stage == 3:
            return [[torch.cat([flat.detach() for flat in part["fp32_flat_groups"]])] for part in self._optimizers]
        return [[flat.detach() for flat in part["single_partition_of_fp32_groups"]] for part in self._optimizers]

    def _load(self, name: str) -> dict[str, Any]:
        loaded = torch.load(self.path / TAG / name, weights_only=True, map_location="cpu", mmap=True)
        if not isinstance(loaded, dict):
            raise pickle.UnpicklingError(f"{TAG}/{name} holds no states")
        return loaded


class _Whole(Mapping[str, Tensor]):
    def __init__(self, checkpoint: ShardedCheckpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> Tensor:
        return self._checkpoint.whole(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.shapes)

    def __len__(self) -> int:
        return len(self._checkpoint.shapes)


def is_sharded(path: Path) -> bool:
    """Whether a path is such a directory, whole or not."""
    return (path / TAG).is_dir()


def refuse_other_sharding(path: Path, now: Sharding | None) -> None:
    """Refuse to resume what was saved by another number of ranks, at another stage, or in another precision.

    Args:
        path: A checkpoint, a file or a directory.
        now: How this run shares out its state; None if it does not.

    Raises:
        Damaged: it cannot be read.
        UserError: naming both, and what can be done instead.
    """
    then = ShardedCheckpoint.open(path).sharding if is_sharded(path) else None
    if then != now:
        raise UserError(
            f"ckpt_path {path} was saved by {then or 'a run without ZeRO'}, and this run has {now or 'no ZeRO'}: resume"
            f" as it was saved (trainer.strategy, devices, num_nodes, precision), or start a new run from its weights"
            f" with --init_from {path}, which any strategy can"
        )


def _states_of(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
