import pytest
import torch

from kvpath.inference import generate
from tests.cases import SHIPPED, Case, every_case, tokens
from tests.parity import logits

PROMPTS = [tokens(length, seed=length).tolist() for length in (1, 6, 3)]


@every_case
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_batch_gives_what_each_gives_alone(case: Case, temperature: float) -> None:
    model = case.decoder()
    together = generate(model, PROMPTS, 6, temperature=temperature, seed=4)
    alone = [
        generate(model, [prompt], 6, temperature=temperature, seed=4 + row)[0] for row, prompt in enumerate(PROMPTS)
    ]
    assert together == alone
    assert [len(row) for row in together] == [6, 6, 6]


@every_case
def test_greedy_tokens_are_those_of_a_model_without_a_cache(case: Case) -> None:
    model = case.decoder()
    for prompt, new in zip(PROMPTS, generate(model, PROMPTS, 5), strict=True):
        whole = prompt + new
        likeliest = logits(model, torch.tensor([whole]))[0, len(prompt) - 1 : -1, :13].argmax(-1)
        assert likeliest.tolist() == new


def test_rows_end_by_themselves() -> None:
    model = SHIPPED[0].decoder()
    free = generate(model, PROMPTS, 8, temperature=1.0)
    end = free[1][2]
    ended = generate(model, PROMPTS, 8, temperature=1.0, end_token=end)
    assert ended == [row[: row.index(end) + 1] if end in row else row for row in free]
    assert len(ended[1]) <= 3


def test_top_k_of_one_is_greedy_and_seeds_differ() -> None:
    model = SHIPPED[0].decoder()
    assert generate(model, PROMPTS, 5, temperature=2.0, top_k=1) == generate(model, PROMPTS, 5)
    drawn = [generate(model, PROMPTS, 12, temperature=2.0, seed=seed) for seed in (0, 0, 100)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    model = SHIPPED[0].decoder()
    with torch.no_grad():
        model.head.weight[13:] = 0
        model.head.weight[:13] *= 1e-3
    drawn = generate(model, [[1]] * 8, 20, temperature=100.0)
    assert max(token for row in drawn for token in row) < 13


def test_the_model_is_left_as_it_was() -> None:
    model = SHIPPED[0].decoder()
    model.train()
    state = torch.get_rng_state()
    generate(model, PROMPTS, 2, temperature=1.0)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
