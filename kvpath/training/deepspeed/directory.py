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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

TAG, LATEST = "checkpoint", "latest"

Key = TypeVar("Key")
Value = TypeVar("Value")

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


class _Keys(NamedTuple):
    """Under what a file of a rank's part holds it."""

    weights: str
    states: str


_STAGES_1_AND_2 = _Keys("single_partition_of_fp32_groups", "base_optimizer_state")
_STAGE_3 = _Keys("fp32_flat_groups", "optimizer_state_dict")


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
        if not (path / LATEST).is_file() or (path / LATEST).read_bytes() != TAG.encode():
            raise FileNotFoundError(f"{LATEST} is missing or cut off, so it was not written to its end")
        names = [file.name for file in (path / TAG).iterdir()]
        alone = "mp_rank_00_model_states.pt" in names
        self._states = self._load("mp_rank_00_model_states.pt" if alone else _states_of(0))
        try:
            stage, ranks = self._states["ds_config"]["zero_optimization"]["stage"], self._states["dp_world_size"]
            self.sharding = Sharding(int(stage), int(ranks), bf16=any(name.startswith("bf16_") for name in names))
            self.shapes  # noqa: B018 (whether they can be told)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise pickle.UnpicklingError(f"{TAG} holds no states of ZeRO") from error
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
        return _Lazy(self.shapes, self.whole)

    @property
    def optimizer_states(self) -> list[dict[str, Any]]:
        """What an optimizer of whole parameters would have stored: moments by the place of the parameter."""
        names = [list(shapes) for shapes in self._states["param_shapes"]]
        stored, places = self._first[self._keys.states], count()
        groups = [
            {**group, "params": [next(places) for _ in own]}
            for group, own in zip(stored["param_groups"], names, strict=True)
        ]
        in_order = [name for own in names for name in own]
        first: dict[str, Any] = next(iter(stored["state"].values()), {})

        def state(place: int) -> dict[str, Any]:
            name = in_order[place]
            # A moment is a vector; the count of steps is a number, and each parameter's own: it is added to in place.
            return {
                key: self.whole(name, key) if torch.as_tensor(value).dim() else deepcopy(value)
                for key, value in first.items()
            }

        return [{"state": _Lazy(range(len(in_order)), state), "param_groups": groups}]

    def whole(self, name: str, moment: str | None = None) -> Tensor:
        """One weight, or that of its moments which is named, put together from the parts of all ranks."""
        shape = self.shapes[name]
        name, size = self._tied.get(name, name), math.prod(shape)
        start, ranks = self._offsets[name], [self._flat(part, moment) for part in self._optimizers]
        if self.sharding.stage == 3:
            # Of every parameter each rank has an equal part, the last one padded; one after the other.
            part = math.ceil(size / self.sharding.ranks)
            return torch.cat([_between(flat, start, start + part) for flat in ranks])[:size].view(shape)
        # The parameters of a group one after the other, cut into one part for each rank.
        group = next(i for i, shapes in enumerate(self._states["param_shapes"]) if name in shapes)
        return _between([flat[group] for flat in ranks], start, start + size).view(shape)

    def _flat(self, part: dict[str, Any], moment: str | None) -> list[Tensor]:
        """Of what a rank has, the weights or one of their moments: a vector for each group."""
        if moment is None:
            return [flat.detach() for flat in part[self._keys.weights]]
        return [state[moment] for _, state in sorted(part[self._keys.states]["state"].items())]

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
        return [self._first, *(self._load(name)["optimizer_state_dict"] for name in self._parts[1:])]

    @cached_property
    def _first(self) -> dict[str, Any]:
        """Of the first rank, which says what all have."""
        part: dict[str, Any] = self._load(self._parts[0])["optimizer_state_dict"]
        return part

    @property
    def _paddings(self) -> list[list[int]] | None:
        return None if self.sharding.stage == 3 else self._first.get("param_alignment_paddings")

    @property
    def _keys(self) -> "_Keys":
        return _STAGE_3 if self.sharding.stage == 3 else _STAGES_1_AND_2

    def _load(self, name: str) -> dict[str, Any]:
        from kvpath.training.stored_config import load_plain  # which needs this file

        return load_plain(self.path / TAG / name, self.path)


class _Lazy(Mapping[Key, Value]):
    """Values that are made when they are asked for."""

    def __init__(self, keys: Collection[Key], make: Callable[[Key], Value]) -> None:
        self._keys, self._make = keys, make

    def __getitem__(self, key: Key) -> Value:
        return self._make(key)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _between(vectors: Iterable[Tensor], start: int, stop: int) -> Tensor:
    """What lies from `start` to `stop` of vectors that follow one another."""
    found = []
    for vector in vectors:
        found.append(vector[max(0, start) : max(0, stop)])
        start, stop = start - len(vector), stop - len(vector)
    return torch.cat(found)


def is_sharded(path: Path) -> bool:
    """Whether a path is such a directory, whole or not."""
    return (path / TAG).is_dir()


def _states_of(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
