"""Weights and moments of any checkpoint, put into the parts of them that a rank has.

DeepSpeed itself reads what as many ranks wrote at the same stage, and nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer


@dataclass(frozen=True)
class Part:
    """A stretch of a parameter that this rank updates, and where it lies in what this rank has."""

    parameter: Parameter
    start: int
    """Of the stretch, in the parameter."""

    size: int
    """The last rank's may go on after the parameter's end."""

    vector: Tensor
    """Of the weights in float32: such stretches of a whole group, one after the other."""

    at: int
    """Where in the vector it begins."""

    def fill(self, vector: Tensor, whole: Tensor) -> None:
        """Copy the stretch of a whole parameter, or of a moment of it, into the weights, or into such moments."""
        found = whole.flatten()[self.start : self.start + self.size]
        vector[self.at : self.at + len(found)].copy_(found)


def take(engine: Any, stored: Mapping[str, Any], order: Sequence[str]) -> None:
    """Take weights and moments, whatever shared out the state that they are of; no rank holds more than one whole.

    Args:
        engine: DeepSpeed's, of stage 1, 2 or 3.
        stored: A checkpoint, as `read_checkpoint` gives it.
        order: The names of the parameters, one after the other as the optimizer was given them.
    """
    (states,) = stored["optimizer_states"]
    optimizer: Optimizer = engine.optimizer.optimizer
    for group, theirs in zip(optimizer.param_groups, states["param_groups"], strict=True):
        group.update({key: value for key, value in theirs.items() if key != "params"})
    places = {name: place for place, name in enumerate(order)}
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    with torch.no_grad():
        for part in _parts(engine.optimizer, engine.global_rank):
            name = names[id(part.parameter)]
            part.fill(part.vector, stored["state_dict"][name])
            moments = optimizer.state[part.vector]
            for key, value in states["state"].get(places[name], {}).items():
                if torch.as_tensor(value).dim() == 0:
                    moments[key] = value
                else:
                    part.fill(moments.setdefault(key, torch.zeros_like(part.vector)), value)
        for name, parameter in engine.module.named_parameters():
            _set(parameter, stored["state_dict"][name], engine.global_rank)


def _parts(zero: Any, rank: int) -> Iterator[Part]:
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3
        for parameter in (parameter for group in zero.fp16_groups for parameter in group):
            group, at, size = zero.grad_position[zero.get_param_id(parameter)]
            yield Part(parameter, rank * size, size, zero.fp32_partitioned_groups_flat[group], at)
        return
    for group, vector in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
        for parameter in group:
            if (mapping := parameter._hp_mapping) is not None:  # else all of it is another rank's
                of_parameter, of_vector = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield Part(parameter, of_parameter.start, of_parameter.numel, vector, of_vector.start)


def _set(parameter: Parameter, whole: Tensor, rank: int) -> None:
    """The weights that the passes use."""
    if (own := getattr(parameter, "ds_tensor", None)) is not None:
        Part(parameter, rank * own.numel(), own.numel(), own, at=0).fill(own, whole)
    if parameter.shape == whole.shape:
        parameter.copy_(whole)
