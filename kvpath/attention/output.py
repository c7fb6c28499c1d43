"""The write side of attention: how the heads' outputs become an update of the residual stream."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from torch import nn


class LinearMaker(Protocol):
    """What an output projection needs of the backbone."""

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        ...

    def linear(self, n_in: int, n_out: int) -> nn.Module:
        """A linear layer, initialised."""
        ...


class OutputProjection(ABC):
    """Builds the module from all heads' outputs, (B, T, H * V), to the residual stream, (B, T, C)."""

    @abstractmethod
    def build(self, n_in: int, backbone: LinearMaker) -> nn.Module:
        """The module for `n_in` = H * V features."""


@dataclass
class DenseOutput(OutputProjection):
    """One matrix, as everywhere."""

    def build(self, n_in: int, backbone: LinearMaker) -> nn.Module:
        """A linear layer from `n_in` to the model's width."""
        return backbone.linear(n_in, backbone.d_model)
