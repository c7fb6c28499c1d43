"""Running a trained model: the cache and generation."""

from kvpath.inference.cache import Cache
from kvpath.inference.generate import generate
from kvpath.inference.sampling import SamplingConfig

__all__ = ["Cache", "SamplingConfig", "generate"]
