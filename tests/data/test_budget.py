"""Steps and accumulation from tokens and a global batch, and the nearest possible where they do not divide."""

import re

import pytest
from jsonargparse import ArgumentParser

from kvpath.data.budget import Budget
from kvpath.errors import UserError


@pytest.mark.parametrize(("tokens", "seq_len", "steps"), [(10e9, 2048, 19_073), (1e9, 8192, 477), (10**9, 32_768, 119)])
def test_the_papers_steps(tokens: float, seq_len: int, steps: int) -> None:
    plan = Budget(tokens, global_batch_sequences=256, micro_batch=8).plan(seq_len, world_size=8)
    assert (plan.steps, plan.accumulation, plan.sequences_per_rank) == (steps, 4, 32)
    assert plan.tokens_per_step == 256 * seq_len
    assert plan.tokens == steps * 256 * seq_len


def test_tokens_and_sequences_say_the_same_whatever_the_devices() -> None:
    for world_size, micro_batch in ((1, 1), (2, 4), (4, 3), (1, 24)):
        in_sequences = Budget(1e6, global_batch_sequences=24, micro_batch=micro_batch).plan(64, world_size)
        in_tokens = Budget(1e6, global_batch_tokens=24 * 64, micro_batch=micro_batch).plan(64, world_size)
        assert in_sequences == in_tokens
        assert in_sequences.accumulation * world_size * micro_batch == 24
        assert in_sequences.steps == 651


def test_no_tokens_is_one_epoch_and_no_window_twice() -> None:
    budget = Budget(global_batch_sequences=2)
    assert budget.plan(8, 1, corpus_tokens=2 * 16 + 1).steps == 2
    assert budget.plan(8, 1, corpus_tokens=2 * 16).steps == 1
    with pytest.raises(UserError, match="budget.tokens must be stated"):
        budget.plan(8, 1)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Budget(1e6), "state exactly one of .*, got None and None"),
        (Budget(1e6, 4, 1024), "state exactly one of .*, got 4 and 1024"),
        (Budget(1.5, 4), "budget.tokens must be a whole number of at least 1, got 1.5"),
        (
            Budget(1e6, 0, micro_batch=-1),
            "global_batch_sequences must .* got 0; budget.micro_batch must .* got -1",
        ),
        (
            Budget(1e6, 250, micro_batch=8),
            "budget.global_batch_sequences 250 is not a multiple of world_size 2 x budget.micro_batch 8 = 16; "
            "nearest possible: 240 and 256, or budget.micro_batch 5",
        ),
        (Budget(1e6, 3, micro_batch=2), "multiple of world_size 2 x budget.micro_batch 2 = 4; nearest possible: 4$"),
        (
            Budget(1e6, global_batch_tokens=1000),
            "budget.global_batch_tokens 1000 is not a multiple of seq_len 64 x world_size 2 x "
            "budget.micro_batch 1 = 128; nearest possible: 896 and 1024$",
        ),
        (Budget(255, 4), "budget.tokens 255 is under one optimizer step of 256 tokens"),
    ],
)
def test_impossible_budgets_are_refused_with_what_would_do(budget: Budget, message: str) -> None:
    with pytest.raises(UserError, match=message):
        budget.plan(64, world_size=2)


def test_a_corpus_under_one_step_is_refused() -> None:
    with pytest.raises(UserError, match="one epoch of the corpus, 255 is under one optimizer step of 256 tokens"):
        Budget(global_batch_sequences=4).plan(64, 1, corpus_tokens=256)


def test_the_plan_in_one_line() -> None:
    line = Budget(1e6, 24, micro_batch=3).plan(64, 4).describe()
    assert "\n" not in line
    assert re.search("651 steps of 24 x 64 tokens = 999,936 tokens; a step is 4 ranks x 2 accumulated x 3", line)


def test_yaml_may_say_10e9() -> None:
    parser = ArgumentParser()
    parser.add_argument("--budget", type=Budget)
    parsed = parser.parse_args(["--budget.tokens=10e9", "--budget.global_batch_tokens=524288"])
    budget = parser.instantiate_classes(parsed).budget
    assert budget == Budget(10_000_000_000, global_batch_tokens=524_288)
    assert budget.plan(2048, 1).steps == 19_073
