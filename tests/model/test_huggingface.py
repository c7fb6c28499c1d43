"""Our GQA and transformers' Llama from the same weights: the same logits, losses and training (float64).

Their norms work in float32 at every dtype, so equality ends near 1e-7.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from kvpath.attention import GQA
from kvpath.model import BackboneConfig, Decoder

transformers = pytest.importorskip("transformers")

NAMES = {
    "attention.norm": "input_layernorm",
    "attention.w_q": "self_attn.q_proj",
    "attention.w_k": "self_attn.k_proj",
    "attention.w_v": "self_attn.v_proj",
    "attention.w_o": "self_attn.o_proj",
    "norm": "post_attention_layernorm",
    "mlp.w_gate": "mlp.gate_proj",
    "mlp.w_up": "mlp.up_proj",
    "mlp.w_down": "mlp.down_proj",
}
"""Our names in a block, and theirs in a layer."""


def their_name(name: str) -> str:
    outside = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not name.startswith("blocks."):
        return outside.get(name, "lm_head.weight")
    _, layer, inner = name.split(".", 2)
    return f"model.layers.{layer}.{NAMES[inner.removesuffix('.weight')]}.weight"


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
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=20, num_hidden_layers=2, intermediate_size=28, num_attention_heads=4,
        num_key_value_heads=n_kv_heads, head_dim=6, rms_norm_eps=1e-5, tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, attn_implementation="sdpa",
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).double()
    weights: dict[str, Tensor] = {their_name(name): value for name, value in ours.named_parameters()}
    if tied:
        weights["lm_head.weight"] = ours.embedding.weight
    theirs.load_state_dict(weights)
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
        assert_close(value, weights[their_name(name)], atol=1e-6, rtol=0, msg=name)
