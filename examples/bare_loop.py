"""The bare model in a plain torch loop: no Lightning, no data module."""

import sys

import torch

from kvpath.attention import MLA
from kvpath.inference import SamplingConfig, generate
from kvpath.model import BackboneConfig, Decoder


def main(steps: int) -> float:
    """Learn to count modulo 17; gives the last loss in nats per token."""
    torch.manual_seed(0)
    config = BackboneConfig(
        vocab_size=17,
        d_model=32,
        n_layers=2,
        d_ff=64,
        attention=MLA(n_heads=2, head_dim=16, latent_dim=16, rotary_dim=8),
    )
    model = Decoder(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        start = torch.randint(17, (8, 1))
        sequence = (start + torch.arange(25)) % 17
        sums = model(sequence[:, :-1], sequence[:, 1:])
        loss = sums.total / sums.count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    (row,) = generate(model, [[5, 6, 7]], SamplingConfig(max_new_tokens=5, temperature=0))
    print("after 5, 6, 7 comes", row.tokens)
    return loss.item()


if __name__ == "__main__":
    print(f"loss: {main(int(sys.argv[1]) if len(sys.argv) > 1 else 100):.3f}")
