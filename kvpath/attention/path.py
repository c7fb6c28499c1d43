"""Paths: consecutive layers that share one alpha state. The last path of a model may be shorter."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvpath.attention.strategy import AttentionStrategy


@dataclass(kw_only=True)
class PathStrategy(AttentionStrategy):
    """What the members of the KVPath family have in common (KVPath, section 2.1)."""

    path_length: int
    """Layers to a path (m, or g in the ablations)."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the fields."""
        yield from super().problems()
        if self.path_length < 1:
            yield f"path_length must be positive, got {self.path_length}"

    def path_start(self, layer: int) -> int:
        """The first layer of the path of `layer`, which makes alpha."""
        return layer - layer % self.path_length

    def starts_path(self, layer: int) -> bool:
        """Whether `layer` is the first of its path."""
        return layer % self.path_length == 0
