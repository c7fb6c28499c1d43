import weakref
from collections.abc import Callable
from importlib import import_module

import pytest
import torch

from kvpath.attention import GQA
from kvpath.errors import UserError
from kvpath.inference import SamplingConfig, generate
from kvpath.inference.generate import Decoding, Row, one_pass
from kvpath.model import Decoder
from tests.cases import SHIPPED, Case, every_case, tokens
from tests.parity import logits

PROMPTS = [tokens(length, seed=length).tolist() for length in (1, 6, 3)]

GREEDY = SamplingConfig(max_new_tokens=6, temperature=0)
DRAWN = SamplingConfig(max_new_tokens=6, temperature=1.3, seed=4)
FILTERED = SamplingConfig(
    max_new_tokens=5, temperature=1.0, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2, n=2, seed=7
)


def run(decoding: Decoding) -> list[Row]:
    for _ in decoding:
        pass
    return decoding.rows


def new_tokens(model: Decoder, prompts: list[list[int]], config: SamplingConfig) -> list[list[int]]:
    return [row.tokens for row in generate(model, prompts, config)]


@every_case
@pytest.mark.parametrize(("config", "compact"), [(DRAWN, False), (FILTERED, True)], ids=["drawn", "filtered-compact"])
def test_a_batch_gives_what_each_gives_alone(case: Case, config: SamplingConfig, compact: bool) -> None:
    model = case.decoder().eval()
    if compact:
        model.compact()
    together = generate(model, PROMPTS, config)
    assert [row.prompt for row in together] == [prompt for prompt in PROMPTS for _ in range(config.n)]
    for number, row in enumerate(together):
        assert run(Decoding(model, [row.prompt], config, first_row=number)) == [row]
        assert (len(row.tokens), row.stop_reason) == (config.max_new_tokens, "length")


def test_a_batch_gives_what_each_gives_alone_in_float32() -> None:
    model = SHIPPED[0].decoder(torch.float32)
    for number, row in enumerate(generate(model, PROMPTS, FILTERED)):
        assert run(Decoding(model, [row.prompt], FILTERED, first_row=number)) == [row]


@every_case
def test_greedy_tokens_are_those_of_a_model_without_a_cache(case: Case) -> None:
    model = case.decoder()
    for prompt, new in zip(PROMPTS, new_tokens(model, PROMPTS, GREEDY), strict=True):
        whole = prompt + new
        likeliest = logits(model, torch.tensor([whole]))[0, len(prompt) - 1 : -1, :13].argmax(-1)
        assert likeliest.tolist() == new


@pytest.mark.parametrize("config", [DRAWN, FILTERED], ids=["drawn", "penalised"])
def test_rows_end_by_themselves_and_leave_the_others_as_they_were(config: SamplingConfig) -> None:
    model = SHIPPED[0].decoder()
    free = generate(model, PROMPTS, config)
    ends = [free[1].tokens[1], free[2].tokens[2]]
    ended = generate(model, PROMPTS, SamplingConfig(**{**vars(config), "stop_tokens": ends}))
    for row, whole in zip(ended, free, strict=True):
        stop = next((i + 1 for i, token in enumerate(whole.tokens) if token in ends), None)
        assert row.tokens == whole.tokens[:stop]
        assert row.stop_reason == ("length" if stop is None else "token")
    assert len(ended[1].tokens) <= 2


def test_rows_that_ended_are_not_computed_any_more() -> None:
    model = SHIPPED[0].decoder()
    batches: list[int] = []
    model.register_forward_pre_hook(lambda _, arguments: batches.append(len(arguments[0])))
    decoding = Decoding(model, [PROMPTS[0], PROMPTS[1], PROMPTS[1], PROMPTS[2]], DRAWN)
    for number, step in enumerate(decoding):
        if number < 3:
            decoding.stop(number, "string")
        assert [row for row, _ in step] == list(range(min(number, 3), 4))
    assert batches == [3, 4, 2, 1, 1, 1]  # equal prompts once, then rows; dropped once they are half of the batch
    assert [len(row.tokens) for row in decoding.rows] == [1, 2, 3, 6]


def test_penalties_and_seeds_change_what_is_drawn() -> None:
    model = SHIPPED[0].decoder()
    config = SamplingConfig(max_new_tokens=12, temperature=1.0)
    drawn = [
        new_tokens(model, PROMPTS, SamplingConfig(**{**vars(config), **change}))
        for change in ({}, {}, {"seed": 1}, {"repetition_penalty": 2.0})
    ]
    assert drawn[0] == drawn[1]
    assert drawn[0] not in drawn[2:]


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    model = SHIPPED[0].decoder()
    with torch.no_grad():
        model.head.weight[13:] = 0
        model.head.weight[:13] *= 1e-3
    drawn = new_tokens(model, [[1]] * 8, SamplingConfig(max_new_tokens=20, temperature=100.0))
    assert max(token for row in drawn for token in row) < 13
    assert len({tuple(row) for row in drawn}) == 8


def test_the_model_is_left_as_it_was() -> None:
    model = SHIPPED[0].decoder()
    model.train()
    state = torch.get_rng_state()
    generate(model, PROMPTS, DRAWN)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("prompts", [[PROMPTS[1]], PROMPTS], ids=["one", "padded"])
def test_decoding_is_compiled_at_most_twice(prompts: list[list[int]]) -> None:
    model = Case("one-layer", GQA(n_heads=2, n_kv_heads=1, head_dim=4), n_layers=1).decoder()
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    step = torch.compile(one_pass(model), dynamic=True, backend=backend)
    config = SamplingConfig(max_new_tokens=12, temperature=1.0)
    assert run(Decoding(model, prompts, config, step=step)) == generate(model, prompts, config)
    assert 1 <= len(graphs) <= 2


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts must hold at least one prompt, got none"),
        ([[1], []], "prompt 1 is empty: it must hold at least one token"),
        ([[1, 13]], "prompt 0: token 13 at place 1 is out of range: vocab_size is 13"),
        ([[1], [2, 3, -1], []], "prompt 1: token -1 at place 2 is out of range: vocab_size is 13; prompt 2 is empty"),
    ],
)
def test_prompts_that_cannot_be_continued(prompts: list[list[int]], message: str) -> None:
    with pytest.raises(UserError) as error:
        generate(SHIPPED[0].decoder(), prompts, GREEDY)
    assert message in str(error.value)


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(UserError, match="stop strings need a tokenizer"):
        generate(SHIPPED[0].decoder(), [[1]], SamplingConfig(stop=["x"]))


def test_a_long_context_is_warned_of_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    model = SHIPPED[0].decoder(max_seq_len=8)
    generate(model, [[1, 2, 3]], SamplingConfig(max_new_tokens=5))
    assert capsys.readouterr().err == ""
    (row,) = generate(model, [[1, 2, 3]], SamplingConfig(max_new_tokens=6))
    assert len(row.tokens) == 6
    assert "warning: up to 9 tokens of context" in (error := capsys.readouterr().err)
    assert "more than the max_seq_len=8" in error


def test_a_batch_too_large_for_memory_says_what_it_needs_before_allocating(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SHIPPED[0].decoder(max_seq_len=100_000)
    allocated: list[object] = []
    # The package has a function of the module's name.
    monkeypatch.setattr(import_module("kvpath.inference.generate"), "Cache", lambda *a, **k: allocated.append(a))
    monkeypatch.setattr("kvpath.inference.memory.free_bytes", lambda device: 100_000_000)
    # 3 layers x (keys and values) x 3 heads x 6 features x 8 bytes, and 8 bytes for the position
    needed = 4 * 50_176 * 864 + 50_176 * 8
    with pytest.raises(UserError) as error:
        Decoding(model, [[1]] * 4, SamplingConfig(max_new_tokens=50_000))
    assert f"a cache of 4 rows x 50,000 tokens in float64 needs {needed / 1e9:.2f} GB" in str(error.value)
    assert "cpu has 0.10 GB free: 2 rows of that length fit" in str(error.value)
    assert allocated == []


def test_a_decoding_that_is_done_holds_no_cache() -> None:
    decoding = Decoding(SHIPPED[0].decoder(), [[1], [2, 3]], SamplingConfig(max_new_tokens=2))
    steps = iter(decoding)
    next(steps)
    cache = weakref.ref(decoding._cache)
    assert cache() is not None
    assert len(list(steps)) == 1
    assert cache() is None
