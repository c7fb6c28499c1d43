"""The chunked loss against torch's cross-entropy of whole logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from kvpath.model import IGNORE, linear_cross_entropy
from tests.cases import SHIPPED, VOCAB_SIZE, tokens

BATCH, LENGTH, WIDTH, VOCAB = 2, 7, 5, 11
EVERYTHING = 10**9


def inputs(dtype: torch.dtype = torch.float64, ignored: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head and labels, some of which are ignored."""
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCAB, (BATCH, LENGTH))
    return x, weight, labels.masked_fill(torch.rand(BATCH, LENGTH) < ignored, IGNORE)


def reference(x: Tensor, weight: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """The trained total and the negative log-likelihoods, in float64."""
    logits = x.double() @ weight.double().T
    nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return nll + z_loss * logits.logsumexp(-1)[labels != IGNORE].square().sum(), nll


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("chunk_elements", [1, 3 * VOCAB, 4 * VOCAB + 1, EVERYTHING])
def test_values_and_gradients(chunk_elements: int, z_loss: float) -> None:
    x, weight, labels = inputs()
    sums = linear_cross_entropy(x, weight, labels, z_loss, chunk_elements)
    total, nll = reference(x, weight, labels, z_loss)
    assert_close(sums.total, total, atol=1e-10, rtol=0)
    assert_close(sums.nll, nll, atol=1e-10, rtol=0)
    assert int(sums.count) == int((labels != IGNORE).sum()) < BATCH * LENGTH
    each = F.cross_entropy((x @ weight.T).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
    assert_close(sums.nll_BT, each.detach().view(BATCH, LENGTH), atol=1e-10, rtol=0)
    found = torch.autograd.grad(sums.total * 3.7, (x, weight))
    assert_close(found, torch.autograd.grad(total * 3.7, (x, weight)), atol=1e-10, rtol=0)


def test_types() -> None:
    sums = linear_cross_entropy(*inputs(torch.float32))
    assert sums.total.requires_grad
    assert not sums.nll.requires_grad
    assert sums.count.dtype == torch.int64


def test_nothing_to_score() -> None:
    x, weight, labels = inputs(ignored=2.0)
    sums = linear_cross_entropy(x, weight, labels, z_loss=0.1)
    assert [float(part.sum()) for part in sums] == [0, 0, 0, 0]
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(sums.total, (x, weight)))


@pytest.mark.parametrize("label", [-1, VOCAB, VOCAB + 5])
def test_a_label_outside_the_vocabulary_is_an_error(label: int) -> None:
    x, weight, labels = inputs()
    labels[0, 0] = label
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        linear_cross_entropy(x, weight, labels)


@pytest.mark.parametrize("frozen", [0, 1])
def test_gradients_of_one_side_alone(frozen: int) -> None:
    x, weight, labels = inputs()
    free = (x, weight)[1 - frozen]
    (x, weight)[frozen].requires_grad_(False)
    found = torch.autograd.grad(linear_cross_entropy(x, weight, labels).total, free)
    assert_close(found, torch.autograd.grad(reference(x, weight, labels, 0.0)[0], free), atol=1e-10, rtol=0)


def test_evaluation_makes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, labels = inputs()
    monkeypatch.setattr(Tensor, "scatter_add_", lambda *_: pytest.fail("a gradient was made"))
    with torch.no_grad():
        sums = linear_cross_entropy(x, weight, labels)
    assert_close(sums.total, reference(x, weight, labels, 0.0)[0].detach(), atol=1e-10, rtol=0)


def test_huge_logits_are_finite() -> None:
    x, weight, labels = inputs()
    sums = linear_cross_entropy(x * 1e4, weight, labels)
    assert_close(sums.total, reference(x * 1e4, weight, labels, 0.0)[0], rtol=1e-12, atol=0)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(sums.total, (x, weight)))


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_autocast_rounds_products_alone(z_loss: float) -> None:
    """Against float64 on the rounded inputs: logits are rounded to bfloat16 once (2^-9 each), sums are not."""
    x, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        sums = linear_cross_entropy(x, weight, labels, z_loss, 3 * VOCAB)
    rounded = [part.detach().bfloat16().double().requires_grad_() for part in (x, weight)]
    total, nll = reference(rounded[0], rounded[1], labels, z_loss)
    largest = float((rounded[0] @ rounded[1].T).abs().max())
    assert sums.total.dtype in (torch.float32, torch.float64)
    # Each term has two logits in it, the target's and (through the logsumexp) the largest.
    bound = int(sums.count) * 2 * largest * 2**-9
    assert abs(float(sums.nll) - float(nll)) < bound
    assert abs(float(sums.total) - float(total)) < bound * (1 + 2 * z_loss * largest * 2)
    found = torch.autograd.grad(sums.total, (x, weight))
    expected = torch.autograd.grad(total, rounded)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        assert_close(mine.double(), theirs, atol=0.02 * float(theirs.abs().max()), rtol=0)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_in_a_model(tied: bool) -> None:
    """Logits of the whole vocabulary and torch's loss give the same gradients, of a tied table too."""
    tokens_BT, labels_BT = tokens(2, 9), tokens(2, 9, seed=3)
    labels_BT[1, 4:] = IGNORE
    gradients = []
    for chunked in (False, True):
        model = SHIPPED[0].decoder(tied_embeddings=tied)
        if chunked:
            loss = model(tokens_BT, labels_BT, z_loss=0.1).total
        else:
            logits = model(tokens_BT)
            assert logits.shape[-1] == 15 > VOCAB_SIZE
            loss = F.cross_entropy(logits.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORE, reduction="sum")
            loss = loss + 0.1 * logits.logsumexp(-1)[labels_BT != IGNORE].square().sum()
        loss.backward()
        gradients.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert_close(gradients[1], gradients[0], atol=1e-10, rtol=0)
