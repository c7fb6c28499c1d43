"""A stage takes the weights of the run before and goes on in its data, and takes nothing else of it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from kvpath.cli.stages import stream_of
from kvpath.config import load_config
from kvpath.data import Budget, TokenizerConfig
from kvpath.training import LanguageModel
from kvpath.training.stored_config import read_checkpoint
from tests.runs import kvpath, metrics_of, write_config, write_corpus

BLOCK = 64
LONGER = {"data__seq_len": 32, "data__budget__global_batch_sequences": 2}
"""The next stage: twice the length, as many tokens in a step."""


@dataclass(frozen=True)
class Began:
    """What a training step began with."""

    step: int
    tokens: Tensor
    weights: dict[str, Tensor]
    moments: int


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Began]:
    """Every training step from here on."""
    steps: list[Began] = []
    train = LanguageModel.training_step

    def record(self: LanguageModel, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        weights = {name: value.clone() for name, value in self.state_dict().items()}
        steps.append(Began(self.global_step, batch["tokens"].flatten(), weights, len(optimizer.state)))
        return train(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModel, "training_step", record)
    return steps


@pytest.fixture(params=["kept", "streamed"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """A corpus in shuffled blocks, and one that is streamed."""
    if request.param == "kept":
        return {"data__shuffle_block": BLOCK}
    texts = [json.loads(line)["text"] for line in write_corpus(tmp_path).read_text(encoding="utf-8").splitlines()]
    TokenizerConfig("train", vocab_size=300).load(lambda: texts, "texts").save(tmp_path / "tokenizer.json")
    tokenizer = {"name": str(tmp_path / "tokenizer.json")}
    # of one lane, since the order of tokens of several depends on the length of sequences
    return {"data__stream": True, "data__lanes": 1, "data__tokenizer": tokenizer, "data__eval_limit_tokens": 64}


def tokens_of(steps: list[Began]) -> Tensor:
    tokens = torch.cat([step.tokens for step in steps])
    steps.clear()
    return tokens


def test_a_stage_takes_weights_and_place_and_nothing_else(
    tmp_path: Path, data: dict[str, Any], steps: list[Began], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    whole = write_config(tmp_path, "whole.yaml", **data, data__budget__tokens=8 * 64)
    assert kvpath("fit", "-c", whole, "--run", tmp_path / "whole") == 0
    stream = tokens_of(steps)

    short = write_config(tmp_path, "short.yaml", **data, data__budget__tokens=3 * 64)
    assert kvpath("fit", "-c", short, "--run", first) == 0
    assert torch.equal(tokens_of(steps), stream[: 3 * 64])
    longer = write_config(tmp_path, "longer.yaml", **data, **LONGER, data__budget__tokens=3 * 64)
    capsys.readouterr()
    assert kvpath("fit", "-c", longer, "--run", second, "--init_from", first) == 0

    assert f"the data goes on after the 192 tokens that {first} has seen" in capsys.readouterr().err
    began = steps[0]
    assert torch.equal(tokens_of(steps), stream[3 * 64 : 6 * 64])
    left = read_checkpoint(first / "checkpoints" / "last.ckpt")["state_dict"]
    assert began.weights.keys() == left.keys()
    assert all(torch.equal(value, left[name]) for name, value in began.weights.items())
    assert (began.step, began.moments) == (0, 0)
    assert rates(second) == rates(first)
    assert [line["train/tokens"] for line in lines(second)] == [64, 128, 192]

    # a third one, from the second
    assert kvpath("fit", "-c", short, "--run", tmp_path / "third", "--init_from", second, *TWO_STEPS) == 0
    assert torch.equal(tokens_of(steps), stream[6 * 64 : 8 * 64])


TWO_STEPS = ("--data.budget.tokens", str(2 * 64))


def lines(run: Path) -> list[dict[str, Any]]:
    return [line for line in metrics_of(run) if "train/learning_rate" in line]


def rates(run: Path) -> list[float]:
    return [line["train/learning_rate"] for line in lines(run)]


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run of two steps."""
    config = write_config(tmp_path, data__shuffle_block=BLOCK)
    assert kvpath("fit", "-c", config, "--run", tmp_path / "trained", *TWO_STEPS) == 0
    return tmp_path / "trained"


def next_stage(trained: Path, *argv: str | Path) -> int:
    config, run = trained.parent / "toy.yaml", trained.parent / "next"
    return kvpath("fit", "-c", config, "--run", run, "--init_from", trained, *TWO_STEPS, *argv)


@pytest.mark.parametrize(
    ("told", "first"), [([], 128), (["--data.start_tokens", "0"], 0), (["--data.start_tokens=64"], 64)]
)
def test_a_stage_may_be_told_where_to_begin(
    trained: Path, steps: list[Began], told: list[str], first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trained.parent / "whole"
    assert kvpath("fit", "-c", trained.parent / "toy.yaml", "--run", whole, "--data.budget.tokens", "256") == 0
    stream = tokens_of(steps)
    capsys.readouterr()
    assert next_stage(trained, *told) == 0
    assert torch.equal(tokens_of(steps), stream[first : first + 128])
    assert ("the data goes on" in capsys.readouterr().err) == (not told)


def test_a_checkpoint_file_in_a_run_will_do(trained: Path, steps: list[Began]) -> None:
    assert next_stage(trained) == 0
    from_directory = tokens_of(steps)
    config, file = trained.parent / "toy.yaml", trained / "checkpoints" / "last.ckpt"
    assert kvpath("fit", "-c", config, "--run", trained.parent / "again", "--init_from", file, *TWO_STEPS) == 0
    assert torch.equal(tokens_of(steps), from_directory)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data.seed=7"], "data.seed was 0, is 7"),
        (["--data.shuffle_block=32"], "data.shuffle_block was 64, is 32"),
        # the tokenizer of other training documents is another, too
        (["--data.holdout_every=4", "--allow=[data]"], "data.holdout_every was 5, is 4"),
    ],
)
def test_another_stream_is_said_in_one_line_and_begins_at_its_front(
    trained: Path, steps: list[Began], flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = trained.parent / "toy.yaml"
    assert kvpath("fit", "-c", config, "--run", trained.parent / "fresh", *TWO_STEPS, *flags) == 0
    fresh = tokens_of(steps)
    capsys.readouterr()
    assert next_stage(trained, *flags) == 0
    assert torch.equal(tokens_of(steps), fresh)
    line = f"{trained} was trained on another stream ({said}): the data begins at its front"
    assert capsys.readouterr().err.splitlines().count(line) == 1


def test_weights_that_lie_in_no_run_begin_at_the_front(
    trained: Path, steps: list[Began], capsys: pytest.CaptureFixture[str]
) -> None:
    lone = trained.parent / "lone.ckpt"
    lone.write_bytes((trained / "checkpoints" / "last.ckpt").read_bytes())
    config = trained.parent / "toy.yaml"
    assert kvpath("fit", "-c", config, "--run", trained.parent / "lone", "--init_from", lone, *TWO_STEPS) == 0
    assert f"{lone} lies in no run: the data begins at its front" in capsys.readouterr().err


def test_blocks_that_follow_from_the_length_are_another_stream() -> None:
    kept = {"source": "s", "seed": 0, "shuffle_block": None, "seq_len": 16}
    assert stream_of(kept) != stream_of({**kept, "seq_len": 32})
    assert stream_of(kept) == stream_of({**kept, "seq_len": 32, "shuffle_block": 16})
    # a stream is read in its own order
    streamed = {**kept, "stream": True}
    assert stream_of(streamed) == stream_of({**streamed, "seq_len": 32, "seed": 1, "shuffle_block": 64})


def test_weights_of_another_shape_are_refused_by_name(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert next_stage(trained, "--model.backbone.d_ff=20") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kvpath: error: ")]
    assert "last.ckpt is of another model: " in line
    assert "model.blocks.0.mlp.w_gate.weight is (24, 16) in the checkpoint, (20, 16) in this model" in line
    assert not (trained.parent / "next" / "config.yaml").exists()


@pytest.mark.parametrize("what", ["nowhere", "empty"])
def test_no_weights_no_stage(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    config = write_config(tmp_path)
    assert kvpath("fit", "-c", config, "--run", tmp_path / "run", "--init_from", tmp_path / what) == 2
    assert f"kvpath: error: init_from {tmp_path / what}: " in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_stage_resumes_in_its_own_data_without_the_run_before(trained: Path, steps: list[Began]) -> None:
    assert next_stage(trained) == 0
    whole = tokens_of(steps)
    config, run = trained.parent / "toy.yaml", trained.parent / "cut"
    stage = ("fit", "-c", config, "--run", run, "--init_from", trained, *TWO_STEPS)
    assert kvpath(*stage, "--trainer.max_steps=1") == 0
    trained.rename(trained.parent / "moved")
    assert kvpath(*stage, "--ckpt_path", "last", "--trainer.max_steps=-1") == 0
    assert torch.equal(tokens_of(steps), whole)


def test_a_stream_that_is_used_up_ends_in_one_line_and_keeps_what_was_learnt(
    tmp_path: Path, data: dict[str, Any], steps: list[Began], capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, **data, data__repeat=False, data__budget__tokens=10_000 * 64)
    assert kvpath("fit", "-c", config, "--run", tmp_path / "run") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kvpath: error: ")]
    assert "before data.budget.tokens 640000" in line
    assert "data.repeat: true begins a second epoch" in line
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    if "data__stream" in data:
        assert len(steps) > 20
        assert f"ends in step {len(steps) + 1} of 10000" in line
        assert read_checkpoint(last)["global_step"] == len(steps)
    else:  # its length is known before
        assert steps == []
        assert not last.exists()


@pytest.mark.parametrize(
    ("stage", "steps"), [("2k", 19_073), ("8k", 477), ("32k", 119), ("8k_tokens", 1_907), ("32k_tokens", 1_907)]
)
def test_the_papers_stages_have_its_numbers_of_steps(stage: str, steps: int) -> None:
    values = load_config("model/98m", "attention/gqa", f"stage/{stage}").values
    seq_len, budget = values["data"]["seq_len"], Budget(**values["data"]["budget"])
    assert seq_len == values["model"]["backbone"]["max_seq_len"] == int(stage.split("k")[0]) * 1024
    for world_size in (1, 8):
        assert budget.plan(seq_len, world_size).steps == steps
    tokens = 524_288 if stage.endswith("tokens") else 256 * seq_len
    assert budget.plan(seq_len, 1).tokens_per_step == tokens
    optimizer = values["model"]["optimizer"]
    assert optimizer["warmup_steps"] == 100
    assert optimizer["learning_rate"] == (1e-3 if stage == "2k" else 1e-4)
