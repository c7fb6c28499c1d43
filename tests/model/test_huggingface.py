"""Our GQA and transformers' Llama from the same weights: the same logits, losses and training (float64).

Their norms work in float32 at every dtype, so equality ends near 1e-7.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from kvpath.attention import GQA
from kvpath.interop.llama import llama_from, llama_name
from kvpath.model import BackboneConfig, Decoder

pytest.importorskip("transformers")


def pair(n_kv_heads: int, tied: bool = False) -> tuple[Decoder, nn.Module]:
    """Ours, and theirs with our weights."""
    attention = GQA(n_heads=4, n_kv_heads=n_kv_heads, head_dim=6)
    ours = Decoder(
        BackboneConfig(
            vocab_size=32,
            d_model=20,
            n_layers=2,
            d_ff=28,
            pad_vocab_to=1,
            attention=attention,
            init_std=0.2,
            tied_embeddings=tied,
        )
    ).double()
    theirs = llama_from(ours)
    return ours, theirs


def batch(step: int) -> Tensor:
    return torch.randint(0, 32, (3, 17), generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
def test_logits(n_kv_heads: int, tied: bool) -> None:
    ours, theirs = pair(n_kv_heads, tied)
    logits = ours(batch(0))
    assert float(logits.std()) > 0.1
    assert_close(logits, theirs(batch(0)).logits, atol=1e-6, rtol=0)


def our_loss(model: Decoder, tokens_BT: Tensor) -> Tensor:
    sums = model(tokens_BT[:, :-1], tokens_BT[:, 1:])
    return sums.total / sums.count


def their_loss(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens_BT[:, :-1]).logits.flatten(0, 1), tokens_BT[:, 1:].flatten())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_twenty_steps_of_training(tied: bool) -> None:
    ours, theirs = pair(2, tied)
    start = {name: value.detach().clone() for name, value in ours.named_parameters()}
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for model in (ours, theirs)
    ]
    clipped = 0
    for step in range(20):
        losses = our_loss(ours, batch(step)), their_loss(theirs, batch(step))
        assert_close(losses[0].double(), losses[1], atol=1e-6, rtol=0)
        for loss, model, optimizer in zip(losses, (ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        clipped += bool(norm > 1)
    assert clipped > 0
    weights = dict(theirs.named_parameters())
    for name, value in ours.named_parameters():
        assert float((value - start[name]).detach().abs().max()) > 1e-3, name
        assert_close(value, weights[llama_name(name)], atol=1e-6, rtol=0, msg=name)
