"""Running a trained model: the cache and generation."""

from kvpath.inference.cache import GrowingCache
from kvpath.inference.generate import generate

__all__ = ["GrowingCache", "generate"]
