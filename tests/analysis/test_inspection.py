"""A batch recomputed: every number beside one that is computed another way, for every strategy."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvpath.analysis.inspection import Inspection, inspect_batch
from kvpath.attention import GQA
from kvpath.config import build_model
from kvpath.model import BackboneConfig
from kvpath.model.decoder import Decoder
from kvpath.model.loss import IGNORE
from kvpath.testing import concrete_strategies, toys_of

OURS = [strategy for strategy in concrete_strategies() if strategy.__module__.startswith("kvpath.")]
TOKENS = torch.randint(0, 60, (2, 2, 12), generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 60, (2, 2, 12), generator=torch.Generator().manual_seed(1)).masked_fill_(TOKENS < 5, IGNORE)


def toy() -> Decoder:
    attention = GQA(n_heads=2, n_kv_heads=1, head_dim=8)
    config = BackboneConfig(
        vocab_size=60, d_model=16, n_layers=2, d_ff=24, max_seq_len=16, init_std=0.3, attention=attention
    )
    return build_model(config).double()


def test_loss_and_gradients_are_those_of_training() -> None:
    model = toy()
    found = inspect_batch(model, TOKENS, LABELS)
    model.zero_grad()
    total = model(TOKENS.flatten(0, 1), LABELS.flatten(0, 1)).total / (LABELS != IGNORE).sum()
    total.backward()
    assert found.loss == pytest.approx(total.item(), rel=1e-10)
    norms = {
        name: math.sqrt(sum(float(p.grad.square().sum()) for p in part.parameters() if p.grad is not None))
        for name, part in (("blocks.0", model.blocks[0]), ("blocks.1", model.blocks[1]), ("norm", model.norm))
    }
    assert {row.name: row.gradient_norm for row in found.layers if row.name in norms} == pytest.approx(norms, rel=1e-8)
    assert found.gradient_norm > max(norms.values())
    assert sum(row["tokens"] for row in found.documents) == int((LABELS != IGNORE).sum())
    assert [row["sequence"] for row in found.documents] == [0, 1, 2, 3]
    mean = sum(row["tokens"] * row["loss"] for row in found.documents) / int((LABELS != IGNORE).sum())
    assert mean == pytest.approx(found.loss)
    assert found.first_not_finite is None


def test_activations_are_those_of_the_residual_stream() -> None:
    model = toy()
    found = {row.name: row for row in inspect_batch(model, TOKENS, LABELS).layers}
    embedded = model.embedding(TOKENS)
    assert found["embedding"].activation_rms == pytest.approx(embedded.square().mean().sqrt().item())
    logits = model(TOKENS.flatten(0, 1))
    assert found["head"].activation_rms == pytest.approx(logits.square().mean().sqrt().item())
    assert list(found) == ["embedding", "blocks.0", "blocks.1", "norm", "head"]


def test_documents_are_told_apart_and_attention_does_not_cross_them() -> None:
    model = toy()
    documents = (torch.arange(12) >= 7).long().expand(2, 2, 12)
    positions = torch.cat((torch.arange(7), torch.arange(5))).expand(2, 2, 12)
    found = inspect_batch(model, TOKENS, LABELS, documents, positions)
    assert [(row["sequence"], row["document"]) for row in found.documents] == [
        (sequence, document) for sequence in range(4) for document in (0, 1)
    ]
    alone = F.cross_entropy(model(TOKENS[0, 0, None, 7:])[0], LABELS[0, 0, 7:], ignore_index=IGNORE)
    assert found.documents[1]["loss"] == pytest.approx(alone.item(), rel=1e-8)


@pytest.mark.parametrize("strategy", OURS, ids=lambda strategy: strategy.__name__)
def test_every_layer_of_every_strategy_has_a_largest_logit(strategy: type) -> None:
    config = toys_of(strategy)[0].config()
    tokens = TOKENS[:1, :, :8] % config.vocab_size
    found = inspect_batch(build_model(config), tokens, tokens.roll(-1, dims=-1))
    blocks = [row for row in found.layers if row.name.startswith("blocks.")]
    assert len(blocks) == config.n_layers
    for row in blocks:
        assert row.largest_logit is not None
        assert math.isfinite(row.largest_logit)
        assert row.gradient_norm > 0
        assert row.activation_rms > 0


def largest_by_hand(model: Decoder, seen: list[tuple[Tensor, Tensor]]) -> list[float]:
    largest = []
    for q_BHTD, k_BGSD in seen:
        k_BHSD = k_BGSD.repeat_interleave(q_BHTD.shape[1] // k_BGSD.shape[1], dim=1)
        scores = torch.einsum("bhtd,bhsd->bhts", q_BHTD, k_BHSD) / math.sqrt(q_BHTD.shape[-1])
        pairs = [scores[:, :, t, s] for t in range(scores.shape[2]) for s in range(t + 1)]
        largest.append(float(torch.stack(pairs).max()))
    return largest


def test_the_largest_logit_is_that_of_a_visible_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = toy(), []
    product = F.scaled_dot_product_attention

    def look(q: Tensor, k: Tensor, *rest: Tensor, **options: bool) -> Tensor:
        seen.append((q.detach(), k.detach()))
        return product(q, k, *rest, **options)

    found = inspect_batch(model, TOKENS[:1], LABELS[:1])
    monkeypatch.setattr(F, "scaled_dot_product_attention", look)
    model(TOKENS[0])
    by_hand = largest_by_hand(model, seen)
    assert [row.largest_logit for row in found.layers[1:3]] == pytest.approx(by_hand, rel=1e-5)


def first_not_finite(spoil: str) -> str | None:
    model = toy()
    if spoil:
        model.get_parameter(spoil).data.view(-1)[3] = math.nan
    found: Inspection = inspect_batch(model, TOKENS, LABELS)
    return found.first_not_finite


def test_the_first_tensor_that_is_not_finite_is_named() -> None:
    assert first_not_finite("") is None
    assert first_not_finite("blocks.1.norm.weight") == "blocks.1.norm.weight"
    assert first_not_finite("embedding.weight") == "embedding.weight"
    model = toy()
    model.get_submodule("blocks.0.mlp").register_forward_hook(lambda module, read, output: output * math.inf)
    assert inspect_batch(model, TOKENS, LABELS).first_not_finite == "output of blocks.0.mlp"
    model = toy()
    next(model.blocks[1].parameters()).register_hook(lambda gradient: gradient * math.nan)
    name = next(name for name, _ in model.blocks[1].named_parameters())
    assert inspect_batch(model, TOKENS, LABELS).first_not_finite == f"gradient of blocks.1.{name}"
