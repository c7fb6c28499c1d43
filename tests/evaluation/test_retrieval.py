"""Accuracy as counted by hand, and the same by a plain pass and from the cache, whatever the layout."""

import pytest
import torch
from torch import Tensor

from kvpath.data.packing import IGNORE
from kvpath.evaluation.retrieval import Accuracy, answers_right, as_in_generation
from kvpath.model import Decoder
from tests.cases import SHIPPED, VOCAB_SIZE, Case, every_case

CONTEXT = 12


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Five sequences, of which the last is padding; labels here and there."""
    torch.manual_seed(seed)
    tokens, labels = torch.randint(VOCAB_SIZE, (2, 5, CONTEXT))
    labels[torch.rand(labels.shape) < 0.7] = IGNORE
    labels[:, :3], labels[-1] = IGNORE, IGNORE
    return tokens, labels


def test_the_likeliest_token_of_a_vocabulary_without_its_padding_is_the_answer(decoder: Decoder) -> None:
    tokens, labels = batch()
    with torch.no_grad():
        logits = decoder(tokens)
        assert isinstance(logits, Tensor)
        labels[0, 5] = logits[0, 5, : decoder.config.vocab_size].argmax()
        labels[1, 7] = logits[1, 7, : decoder.config.vocab_size].argmin()
    right, asked = answers_right(decoder, tokens, labels)
    expected = [
        (row, place)
        for row in range(5)
        for place in range(CONTEXT)
        if labels[row, place] != IGNORE
        and max(range(decoder.config.vocab_size), key=lambda i: float(logits[row, place, i])) == labels[row, place]
    ]
    assert (0, 5) in expected
    assert (1, 7) not in expected
    assert right.nonzero().tolist() == [list(place) for place in expected]
    assert torch.equal(asked, labels != IGNORE)


@pytest.fixture
def decoder() -> Decoder:
    return SHIPPED[1].decoder()


@every_case
def test_the_cache_answers_as_a_plain_pass_does(case: Case) -> None:
    model = case.decoder().eval()
    tokens, labels = batch()
    with torch.no_grad():
        logits = model(tokens)
        assert isinstance(logits, Tensor)
    likeliest = logits[..., : model.config.vocab_size].argmax(-1)
    # those at even places are right, the others wrong
    even, asked = torch.arange(CONTEXT) % 2 == 0, torch.rand(labels.shape) < 0.5
    labels = torch.where(asked, torch.where(even, likeliest, (likeliest + 1) % VOCAB_SIZE), IGNORE)
    plain, asked = answers_right(model, tokens, labels)
    assert 0 < plain.sum() < asked.sum()
    with torch.inference_mode():
        as_in_generation(model)
        cached, _ = answers_right(model, tokens, labels, through_cache=True)
    model.expand()
    assert torch.equal(plain, cached)


def test_nothing_is_asked_of_padding(decoder: Decoder) -> None:
    tokens, labels = batch()
    for through_cache in (False, True):
        right, asked = answers_right(decoder, tokens[-1:], labels[-1:], through_cache)
        assert not right.any()
        assert not asked.any()


@pytest.mark.parametrize(("whole", "counts"), [(False, (3, 4)), (True, (1, 2))])
def test_an_answer_is_a_label_or_a_whole_sequence(whole: bool, counts: tuple[int, int]) -> None:
    right = torch.tensor([[False, True, True], [False, True, False], [False, False, False]])
    asked = torch.tensor([[False, True, True], [False, True, True], [False, False, False]])
    score = Accuracy(whole).to(torch.bfloat16)
    score.update(right[:1], asked[:1])
    score.update(right[1:], asked[1:])
    correct, asked_for = counts
    assert score.result(None) == {"correct": correct, "asked": asked_for, "accuracy": correct / asked_for}


@pytest.mark.filterwarnings("ignore:.*called before the ``update`` method")
def test_nothing_asked_is_no_result() -> None:
    assert Accuracy().result(None) is None
