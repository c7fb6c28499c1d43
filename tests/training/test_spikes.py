"""Steps that are not taken: each is named, put aside, and leaves weights and moments as they were."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from kvpath.data.regions import Split
from kvpath.errors import UserError
from kvpath.training.bad_batch import BadBatch
from kvpath.training.saving import Saving
from kvpath.training.spikes import GIVE_UP_AFTER, Action, SpikeRule, Spikes
from kvpath.training.stored_config import read_checkpoint
from tests.training.toys import Record, toy_data, toy_module, toy_trainer, weights

STEPS = 10


class Poison(Callback):
    """Spoils some steps, from 1: their gradient is no number, or their logits are 128 times as large."""

    def __init__(self, steps: set[int], spike: bool = False) -> None:
        self.steps, self.spike = steps, spike
        self.after: dict[int, tuple[Tensor, dict[str, Any]]] = {}
        """Weights and moments after each step."""
        self._hook: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step + 1 in self.steps:
            if self.spike:
                pl_module.decoder.norm.weight.data.mul_(128)
            else:
                self._hook = next(pl_module.parameters()).register_hook(lambda gradient: gradient * math.nan)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if self._hook is not None:
            self._hook.remove()
        if self.spike and trainer.global_step in self.steps:
            pl_module.decoder.norm.weight.data.div_(128)
        moments = copy.deepcopy(trainer.optimizers[0].state_dict()["state"])
        self.after[trainer.global_step] = (weights(pl_module), moments)


def run(
    corpus: Path,
    folder: Path,
    bad: set[int],
    on_nan: Action = "stop",
    rule: SpikeRule = SpikeRule(),  # noqa: B008 (it is frozen)
    spike: bool = False,
    save: str = "3 steps",
    resume: bool = False,
    **trainer: Any,
) -> tuple[Poison, Spikes, Record]:
    poison, spikes, saving, record = Poison(bad, spike), Spikes(folder, on_nan, rule), Saving(folder, save), Record()
    callbacks = toy_trainer(record, poison, spikes, saving, enable_checkpointing=True, **trainer)
    callbacks.fit(toy_module(), toy_data(corpus, steps=STEPS), ckpt_path=saving.last if resume else None)
    return poison, spikes, record


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def equal(one: tuple[Tensor, dict[str, Any]], other: tuple[Tensor, dict[str, Any]]) -> bool:
    same = all(
        torch.equal(value, other[1][index][name])
        for index, of_parameter in one[1].items()
        for name, value in of_parameter.items()
    )
    return torch.equal(one[0], other[0]) and same and one[1].keys() == other[1].keys()


def test_by_default_the_run_stops_and_keeps_its_last_checkpoint(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="step 6: the norm of the gradient is nan; its batch is in .*bad_batches"):
        run(corpus, tmp_path, {6})
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 3
    (event,) = events(tmp_path)
    assert (event["step"], event["action"], event["left_out"]) == (6, "stop", None)
    assert event["gradient_norm"] == "nan"
    assert event["loss"] == pytest.approx(5.0, abs=0.1)
    assert "step 6: the norm of the gradient is nan: the run stops" in capsys.readouterr().err


def test_the_batch_is_put_aside(corpus: Path, tmp_path: Path) -> None:
    _, _, whole = run(corpus, tmp_path / "whole", set())
    run(corpus, tmp_path, {4}, "skip")
    data = toy_data(corpus)
    data.setup("fit")
    batch = BadBatch.read(tmp_path / "bad_batches" / "step-000004-rank0.safetensors")
    assert torch.equal(batch.tensors["tokens"].flatten(), whole.tokens[3])
    assert batch.tensors["labels"].shape == batch.tensors["tokens"].shape == (2, 2, 16)
    assert (batch.step, batch.rank, batch.precision) == (4, 0, "32-true")
    assert batch.reason == "the norm of the gradient is nan"
    assert batch.text is not None
    assert batch.text == [data.tokenizer.decode(row.tolist(), False) for row in batch.tensors["tokens"].flatten(0, 1)]
    assert batch.documents is not None
    corpus_of_run = data.source.corpora(data.tokenizer, Split(5))["train"]
    for row, documents in zip(batch.tensors["tokens"].flatten(0, 1).tolist(), batch.documents, strict=True):
        first, last = (corpus_of_run.offsets[i : i + 1].item() for i in (documents[0], documents[-1] + 1))
        found = corpus_of_run.tokens[first:last].tolist()
        assert any(found[at : at + len(row)] == row for at in range(len(found)))
    torch.set_rng_state(batch.random_state["cpu"])


@pytest.mark.parametrize("damage", ["empty", "no tensors", "no json"])
def test_a_file_that_is_no_such_batch_is_named(corpus: Path, tmp_path: Path, damage: str) -> None:
    run(corpus, tmp_path, {4}, "skip")
    file = tmp_path / "bad_batches" / "step-000004-rank0.json"
    if damage == "empty":
        file.with_suffix(".safetensors").write_bytes(b"")
    elif damage == "no json":
        file.write_text("{", encoding="utf-8")
    else:
        from safetensors.torch import save_file

        save_file({"tokens": torch.zeros(2, 2)}, file.with_suffix(".safetensors"))
    with pytest.raises(UserError, match="is no batch that a run put aside") as raised:
        BadBatch.read(file)
    assert damage != "no tensors" or "tokens must be (A, M, T) int64, got (2, 2)" in str(raised.value)


def test_a_step_that_is_skipped_leaves_weights_and_moments_and_moves_on(corpus: Path, tmp_path: Path) -> None:
    _, _, whole = run(corpus, tmp_path / "whole", set())
    poison, spikes, record = run(corpus, tmp_path, {4}, "skip")
    assert equal(poison.after[4], poison.after[3])
    assert not equal(poison.after[5], poison.after[4])
    assert record.learning_rates == whole.learning_rates
    assert all(torch.equal(a, b) for a, b in zip(record.tokens, whole.tokens, strict=True))
    assert spikes.left_out == [(4, 4)]


def test_going_back_takes_up_the_checkpoint_and_passes_over_the_batches_since(corpus: Path, tmp_path: Path) -> None:
    _, _, whole = run(corpus, tmp_path / "whole", set())
    poison, spikes, record = run(corpus, tmp_path, {6}, "back")
    assert equal(poison.after[6], poison.after[3])
    assert not equal(poison.after[7], poison.after[6])
    assert all(torch.equal(a, b) for a, b in zip(record.tokens, whole.tokens, strict=True))
    assert spikes.left_out == [(4, 6)]
    assert events(tmp_path)[0]["left_out"] == [4, 6]


def test_without_a_checkpoint_to_go_back_to_the_step_is_skipped(corpus: Path, tmp_path: Path) -> None:
    poison, spikes, _ = run(corpus, tmp_path, {2}, "back")
    assert equal(poison.after[2], poison.after[1])
    assert spikes.left_out == [(2, 2)]
    assert events(tmp_path)[0]["reason"].endswith("there is no checkpoint to go back to yet")


@pytest.mark.parametrize("on_nan", ["skip", "back"])
@pytest.mark.parametrize("stop", [5, 8])
def test_a_resume_after_it_is_exact(corpus: Path, tmp_path: Path, on_nan: Action, stop: int) -> None:
    whole, left_out, _ = run(corpus, tmp_path / "whole", {6}, on_nan)
    run(corpus, tmp_path / "run", {6}, on_nan, max_steps=stop)
    halves, again, _ = run(corpus, tmp_path / "run", {6}, on_nan, resume=True)
    if on_nan == "skip" or stop > 5:  # else the end of the first half is one more checkpoint to go back to
        assert equal(halves.after[STEPS], whole.after[STEPS])
        assert again.left_out == left_out.left_out
    assert again.losses == (left_out.losses if on_nan == "skip" or stop > 5 else again.losses)


def test_a_run_in_which_no_step_can_be_taken_ends(corpus: Path, tmp_path: Path) -> None:
    callbacks = [Poison(set(range(30))), Spikes(tmp_path, "skip"), Saving(tmp_path)]
    trainer = toy_trainer(*callbacks, enable_checkpointing=True)
    with pytest.raises(UserError, match=f"step {GIVE_UP_AFTER + 1}: .*{GIVE_UP_AFTER} steps before it were left out"):
        trainer.fit(toy_module(), toy_data(corpus, steps=20))


def test_a_spike_stands_above_the_last_steps(corpus: Path, tmp_path: Path) -> None:
    rule = SpikeRule(action="skip", deviations=4.0, steps=4)
    poison, spikes, _ = run(corpus, tmp_path, {2, 7}, rule=rule, spike=True)
    assert spikes.left_out == [(7, 7)]  # before there are four steps, nothing is a spike
    assert equal(poison.after[7], poison.after[6])
    (event,) = events(tmp_path)
    assert event["reason"].startswith("the loss jumped to ")
    assert event["loss"] > 7
    assert len(spikes.losses) == 4
    assert event["loss"] not in spikes.losses


def test_a_rule_that_makes_no_sense() -> None:
    with pytest.raises(UserError, match="deviations must be positive, got 0; on_spike.steps must be at least 2, got 1"):
        SpikeRule(deviations=0, steps=1)


def test_without_the_callback_all_steps_are_taken(corpus: Path) -> None:
    module, poison = toy_module(), Poison({2})
    toy_trainer(poison).fit(module, toy_data(corpus))
    assert not weights(module).isfinite().all()
