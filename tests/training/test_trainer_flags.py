"""A plain Trainer in Python: the data's budget says how long a run is, and Lightning's own flags work within it."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from kvpath.errors import UserError
from tests.training.toys import Record, fitted, toy_data, toy_module, toy_trainer

STEPS = 6


def seen(record: Record) -> list[tuple[int, ...]]:
    return [tuple(tokens.tolist()) for tokens in record.tokens]


def test_the_budget_ends_the_run(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, record = fitted(toy_data(corpus, steps=STEPS))
    assert len(record.losses) == STEPS == len(set(seen(record)))
    said = capsys.readouterr().err
    assert "6 steps of 4 x 16 tokens = 384 tokens; a step is 1 ranks x 2 accumulated x 2 sequences" in said
    assert "warm-up: 1 of 6 steps (17%)" in said
    assert "more than a fifth" not in said


def test_much_warm_up_is_warned_of(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fitted(toy_data(corpus, steps=4))
    assert "warning: more than a fifth of the run is warm-up" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({"max_steps": 2}, 2),
        ({"max_steps": STEPS}, STEPS),
        ({"limit_train_batches": 2}, 2),
        ({"limit_train_batches": 0.5}, 3),
        ({"limit_train_batches": 4, "max_steps": 3}, 3),
        ({"limit_train_batches": 50}, STEPS),
        ({"fast_dev_run": True}, 1),
        ({"fast_dev_run": 2}, 2),
        ({"max_time": {"hours": 1}}, STEPS),
        ({"max_time": {"seconds": 0}}, 0),
    ],
)
def test_flags_may_only_shorten_it(corpus: Path, flags: dict[str, object], steps: int) -> None:
    _, whole = fitted(toy_data(corpus, steps=STEPS))
    _, record = fitted(toy_data(corpus, steps=STEPS), **flags)
    assert record.losses == whole.losses[:steps]
    assert seen(record) == seen(whole)[:steps]
    assert record.learning_rates == whole.learning_rates[:steps]


def test_a_longer_run_is_refused(corpus: Path) -> None:
    with pytest.raises(UserError, match="max_steps=7 is more than the 6 steps of data.budget"):
        fitted(toy_data(corpus, steps=STEPS), max_steps=7)


def test_overfit_batches_repeats_the_same_batches_and_learns_them(corpus: Path) -> None:
    _, record = fitted(toy_data(corpus, steps=24), overfit_batches=2)
    tokens = seen(record)
    assert len(tokens) == 24
    assert tokens == tokens[:2] * 12
    assert len(set(tokens)) == 2
    assert record.losses[-1] < record.losses[0] - 0.8


def test_limit_val_batches(corpus: Path) -> None:
    data = toy_data(corpus, steps=2, eval_batch_tokens=32)
    module, _ = fitted(data, limit_val_batches=2)
    (result,) = module.results
    assert (result["tokens"], result["bytes"]) == (64, None)
    assert "bits_per_byte" not in result
    _, record = fitted(data, limit_val_batches=0)
    assert (record.validated, len(record.losses)) == ([], 2)


def test_validation_does_not_change_training(corpus: Path) -> None:
    data = toy_data(corpus, steps=STEPS)
    _, rarely = fitted(data)
    _, often = fitted(data, val_check_interval=1, check_val_every_n_epoch=None, num_sanity_val_steps=1)
    assert often.validated[-STEPS:] == list(range(1, STEPS + 1))
    assert often.losses == rarely.losses


def test_profiler_and_detect_anomaly(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, plain = fitted(toy_data(corpus))
    _, record = fitted(toy_data(corpus), profiler="simple", detect_anomaly=True)
    assert record.losses == plain.losses
    module = toy_module()
    module.configure_model()
    torch.nn.init.constant_(next(module.parameters()), float("nan"))
    with pytest.raises(RuntimeError, match="nan values"):
        fitted(toy_data(corpus), module, detect_anomaly=True)


@pytest.mark.parametrize("flag", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}])
def test_what_the_module_does_itself_is_refused_by_lightning(corpus: Path, flag: dict[str, object]) -> None:
    with pytest.raises(MisconfigurationException, match="manual optimization"):
        toy_trainer(**flag).fit(toy_module(), toy_data(corpus))


def test_scaled_gradients_are_refused(corpus: Path) -> None:
    scaled = MixedPrecision("16-mixed", "cpu")  # which a Trainer on a CPU would replace
    with pytest.raises(UserError, match="trainer.precision must be .* got 16-mixed"):
        fitted(toy_data(corpus), plugins=[scaled], precision=None)
