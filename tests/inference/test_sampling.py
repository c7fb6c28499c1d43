from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kvpath.errors import UserError
from kvpath.inference.sampling import (
    SamplingConfig,
    choose,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_repetition,
    probabilities,
    row_generator,
)

SHARES = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)


def kept(logits_RV: Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero().flatten().tolist() for row in logits_RV]


def test_top_k_keeps_the_k_likeliest_and_the_first_of_equals() -> None:
    assert kept(keep_top_k(SHARES.log(), 1)) == [[1], [0]]
    assert kept(keep_top_k(SHARES.log(), 3)) == [[1, 2, 3], [0, 1, 2]]
    assert_close(keep_top_k(SHARES.log(), 3)[0, 1:], SHARES[0, 1:].log())


@pytest.mark.parametrize(
    ("p", "expected"),
    [(0.1, [[1], [0]]), (0.5, [[1, 3], [0, 1]]), (0.71, [[1, 2, 3], [0, 1, 2]]), (1.0, [[0, 1, 2, 3]] * 2)],
)
def test_top_p_keeps_the_fewest_that_reach_it(p: float, expected: list[list[int]]) -> None:
    assert kept(keep_top_p(SHARES.log(), p)) == expected


def test_min_p_is_a_fraction_of_the_likeliest() -> None:
    assert kept(keep_min_p(SHARES.log(), 0.6)) == [[1, 3], [0, 1, 2, 3]]
    assert kept(keep_min_p(SHARES.log(), 0.0)) == [[0, 1, 2, 3]] * 2


def test_a_penalty_makes_seen_tokens_less_likely_whatever_their_sign() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    seen = torch.tensor([[True, True, False, False]])
    assert penalise_repetition(logits, seen, 2.0).tolist() == [[1.0, -4.0, 2.0, -2.0]]
    assert penalise_repetition(logits, seen, 1.0) is logits


def test_filters_come_after_the_temperature() -> None:
    found = probabilities(SHARES.log(), SamplingConfig(temperature=0.5, top_k=3, top_p=0.95, min_p=0.3))
    squares = SHARES[0] ** 2  # 0.16, 0.09 and 0.04 of 0.29; 0.04 is less than 0.3 of 0.16
    assert_close(found[0], torch.stack([0 * squares[0], squares[1], 0 * squares[2], squares[3]]) / 0.25)


def test_a_draw_goes_by_the_share_of_each_token() -> None:
    uniform = (torch.arange(1000) + 0.5) / 1000
    tokens = draw(SHARES[:1].expand(1000, -1), uniform.double())
    assert torch.bincount(tokens, minlength=4).tolist() == [100, 400, 200, 300]


def test_what_has_no_share_is_never_drawn() -> None:
    shares = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]], dtype=torch.float64).expand(3, -1)
    assert draw(shares, torch.tensor([0.0, 0.3, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 3, 3]


def test_each_row_has_numbers_of_its_own() -> None:
    numbers = {
        torch.rand((), generator=row_generator(seed, row), dtype=torch.float64).item()
        for seed in range(5)
        for row in range(5)
    }
    assert len(numbers) == 25


def test_greedy_takes_the_likeliest_and_draws_nothing() -> None:
    generator = row_generator(0, 0)
    state = generator.get_state()
    assert choose(SHARES[:1].log(), SamplingConfig(temperature=0), None, [generator]).tolist() == [1]
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be positive, got 0"),
        ({"n": 0}, "n must be positive, got 0"),
        ({"seed": -1}, "seed must not be negative, got -1"),
        ({"temperature": -0.1}, "temperature must be 0 or more, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be 0 or more, got nan"),
        ({"top_k": 0}, "top_k must be positive, got 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
        ({"min_p": 1.5}, "min_p must be between 0 and 1, got 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive, got 0.0"),
        ({"stop": ["a", ""]}, "stop must be a list of strings that are not empty, got ['a', '']"),
        ({"stop": "a"}, "stop must be a list of strings that are not empty, got 'a'"),
        ({"n": 2, "temperature": 0}, "n=2 samples at temperature 0 are all the same"),
        ({"n": 0, "top_k": 0}, "n must be positive, got 0; top_k must be positive, got 0"),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        SamplingConfig(**fields)
    assert message in str(error.value)
