"""Continuations in one padded pass, held against the logits of each row alone."""

import random
from typing import Any

import pytest
import torch

from kvpath.evaluation.continuations import Continuation, batches, score
from kvpath.model.decoder import Decoder
from tests.cases import SHIPPED, VOCAB_SIZE, Case, every_case


def some(sizes: list[tuple[int, int]]) -> list[Continuation]:
    draw = random.Random(1)
    return [
        Continuation(*(tuple(draw.randrange(VOCAB_SIZE) for _ in range(length)) for length in lengths))
        for lengths in sizes
    ]


@torch.no_grad()
def alone(model: Decoder, wanted: Continuation) -> tuple[float, bool]:
    """From all logits of one row without padding."""
    logits_TV = model(torch.tensor([wanted.read]))[0, len(wanted.context) - 1 :]
    labels_T = torch.tensor(wanted.tokens)
    logp = logits_TV.log_softmax(-1).gather(1, labels_T[:, None]).sum()
    return float(logp), bool((logits_TV[:, : model.config.vocab_size].argmax(-1) == labels_T).all())


@torch.no_grad()
def greedy(model: Decoder, context: tuple[int, ...], length: int) -> tuple[int, ...]:
    tokens = list(context)
    for _ in range(length):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1, : model.config.vocab_size].argmax()))
    return tuple(tokens[len(context) :])


@every_case
def test_a_padded_batch_scores_as_each_row_alone(case: Case) -> None:
    model = case.decoder().eval()
    wanted = some([(9, 3), (4, 1), (6, 8), (11, 2)])
    wanted.append(Continuation(wanted[0].context, greedy(model, wanted[0].context, 3)))
    found = score(model, wanted, chunk_elements=3 * model.config.padded_vocab_size)
    for row, continuation in zip(found, wanted, strict=True):
        log_likelihood, is_greedy = alone(model, continuation)
        assert row.log_likelihood == pytest.approx(log_likelihood, abs=1e-9)
        assert row.is_greedy == is_greedy
    assert found[-1].is_greedy
    assert not all(row.is_greedy for row in found)


def test_answers_to_one_question_share_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SHIPPED[0].decoder().eval()
    context = some([(5, 1)])[0].context
    wanted = [Continuation(context, (token,)) for token in (1, 2, 3)]
    read: list[int] = []
    hidden = model.hidden

    def counted(tokens_BT: torch.Tensor, **more: Any) -> torch.Tensor:
        read.append(len(tokens_BT))
        return hidden(tokens_BT, **more)

    monkeypatch.setattr(model, "hidden", counted)
    found = score(model, wanted)
    assert read == [1]
    assert [row.log_likelihood for row in found] == pytest.approx([alone(model, each)[0] for each in wanted])


def test_an_empty_continuation_is_certain() -> None:
    assert score(SHIPPED[0].decoder().eval(), [Continuation((1,), ())]) == [(0.0, True)]


def test_batches_are_longest_first_and_hold_each_place_once() -> None:
    wanted = some([(2, 1), (7, 1), (3, 3), (1, 1)])
    wanted.append(Continuation(wanted[1].context, (0,)))
    found = list(batches(wanted, 2))
    assert found == [[1, 4, 2], [0, 3]]
