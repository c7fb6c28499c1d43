"""The backbone that every attention strategy shares."""

from kvpath.model.config import BackboneConfig
from kvpath.model.decoder import Decoder
from kvpath.model.loss import IGNORE, LossSums, linear_cross_entropy

__all__ = ["IGNORE", "BackboneConfig", "Decoder", "LossSums", "linear_cross_entropy"]
