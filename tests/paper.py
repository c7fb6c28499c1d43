"""The shape of the paper's models, whose parameters and stored elements are known exactly."""

import torch

from kvpath.attention import AttentionStrategy
from kvpath.model import BackboneConfig, Decoder


def parameters_and_stored(attention: AttentionStrategy, d_ff: int | list[int]) -> tuple[int, int]:
    """Parameters, and elements stored per token, of 12 layers of width 512; nothing is allocated."""
    config = BackboneConfig(vocab_size=50257, d_model=512, n_layers=12, d_ff=d_ff, attention=attention)
    with torch.device("meta"):
        model = Decoder(config)
    stored = sum(slot.elements for _, _, slot in model.layout.cached())
    return sum(parameter.numel() for parameter in model.parameters()), stored
