import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from kvpath.errors import UserError
from kvpath.model.loss import IGNORE
from kvpath.training import LanguageModel, OptimizerConfig
from kvpath.training.module import check_shapes
from tests.training.toys import Uneven, fitted, toy_backbone, toy_data, toy_module, toy_trainer, weights


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Two micro-batches of two sequences that score 3 and 18 labels."""
    tokens = torch.randint(0, 300, (2, 2, 10), generator=torch.Generator().manual_seed(3))
    labels = tokens.roll(-1, -1).clone()
    labels[0, 0, 3:] = labels[0, 1] = labels[1, :, -1] = IGNORE
    return {"tokens": tokens, "labels": labels}


def one_step(batch: dict[str, torch.Tensor], clip_norm: float | None, **module: Any) -> tuple[LanguageModel, Any]:
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, clip_norm=clip_norm)
    model = toy_module(optimizer=optimizer, **module)
    model.configure_model()  # in float32, as the reference's
    trainer = toy_trainer(max_steps=1, precision="64-true")
    reports: list[Any] = []
    model.on_train_batch_end = lambda outputs, *_: reports.append(outputs["step"])  # type: ignore[method-assign]
    trainer.fit(model, DataLoader([batch], batch_size=None))
    return model, reports[0]


def reference(batch: dict[str, torch.Tensor]) -> tuple[torch.nn.Module, torch.Tensor]:
    """The weights before the step, and the mean loss over all labels of the step, the plain way."""
    model = toy_module().decoder.double()
    logits = model(batch["tokens"].flatten(0, 1))
    return model, torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE
    )


@pytest.mark.parametrize("clip_norm", [None, 0.01, 1e6])
def test_a_step_is_plain_torch_on_the_mean_over_all_its_labels(
    batch: dict[str, torch.Tensor], clip_norm: float | None
) -> None:
    module, report = one_step(batch, clip_norm)
    model, loss = reference(batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    (optimizer.param_groups[0]["params"],) = [[p for p in model.parameters() if p.dim() > 1]]
    optimizer.add_param_group({"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0})
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm or float("inf"))
    optimizer.step()
    assert report.scored == (batch["labels"] != IGNORE).sum() == 21
    assert (report.nll / report.scored).item() == pytest.approx(loss.item(), rel=1e-12)
    assert report.gradient_norm.item() == pytest.approx(norm.item(), rel=1e-9)
    for (name, ours), theirs in zip(module.decoder.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=name)


def test_any_split_into_micro_batches_trains_the_same(corpus: Path) -> None:
    runs = [
        fitted(toy_data(corpus, micro_batch=micro_batch, kind=Uneven), precision="64-true") for micro_batch in (4, 2, 1)
    ]
    whole, record = runs[0]
    assert len(record.losses) == 3
    for module, other in runs[1:]:
        assert other.losses == pytest.approx(record.losses, rel=1e-12)
        assert other.gradient_norms == pytest.approx(record.gradient_norms, rel=1e-9)
        torch.testing.assert_close(weights(module), weights(whole), rtol=1e-9, atol=1e-12)


def test_a_step_without_any_label_changes_nothing_by_its_loss(batch: dict[str, torch.Tensor]) -> None:
    batch["labels"].fill_(IGNORE)
    _, report = one_step(batch, clip_norm=1.0)
    assert (report.nll.item(), report.scored.item(), report.gradient_norm.item()) == (0.0, 0, 0.0)


def test_z_loss_trains_and_is_not_reported(batch: dict[str, torch.Tensor]) -> None:
    plain, without = one_step(batch, 1.0)
    other, report = one_step(batch, 1.0, z_loss=0.1)
    assert report.nll == without.nll
    assert not torch.equal(weights(plain), weights(other))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_precisions(corpus: Path, precision: str) -> None:
    module = toy_module()
    module.configure_model()
    _, record = fitted(toy_data(corpus, steps=2), module, precision=precision)
    assert len(record.losses) == 2
    assert torch.isfinite(torch.tensor(record.losses)).all()
    dtype = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision, torch.float32)
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    assert record.losses[0] == pytest.approx(fitted(toy_data(corpus, steps=1))[1].losses[0], rel=2e-3)


@pytest.mark.parametrize(
    ("switch", "backend"),
    [
        ("activation_checkpointing", ""),
        ("compile", "aot_eager"),
        pytest.param("compile", "inductor", marks=pytest.mark.slow),
    ],
)
def test_switches_leave_losses_and_gradients_as_they_are(
    corpus: Path, switch: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    data = toy_data(corpus, steps=2)
    plain, record = fitted(data, precision="64-true", limit_val_batches=0)
    switched, other = fitted(data, toy_module(**{switch: True}), precision="64-true", limit_val_batches=0)
    assert other.losses == pytest.approx(record.losses, rel=1e-10)
    assert other.gradient_norms == pytest.approx(record.gradient_norms, rel=1e-8)
    torch.testing.assert_close(weights(switched), weights(plain), rtol=1e-7, atol=1e-9)
    assert switched.state_dict().keys() == plain.state_dict().keys()


def test_seeds_of_weights_and_of_data_are_separate(corpus: Path) -> None:
    _, base = fitted(toy_data(corpus))
    _, other_data = fitted(toy_data(corpus, seed=1))
    _, other_model = fitted(toy_data(corpus), toy_module(seed=1))
    assert not torch.equal(torch.stack(base.tokens), torch.stack(other_data.tokens))
    assert torch.equal(torch.stack(base.tokens), torch.stack(other_model.tokens))
    assert base.losses[0] != other_model.losses[0]
    assert torch.equal(weights_of_seed(0), weights_of_seed(0))
    assert not torch.equal(weights_of_seed(0), weights_of_seed(1))


def weights_of_seed(seed: int) -> torch.Tensor:
    torch.rand(1)  # the global state is no part of it
    module = toy_module(seed=seed)
    module.configure_model()
    return weights(module)


def test_building_the_model_leaves_the_global_random_state(corpus: Path) -> None:
    before = torch.get_rng_state()
    toy_module().configure_model()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_learning_rate_follows_the_step(corpus: Path) -> None:
    _, record = fitted(toy_data(corpus, steps=4))
    config = OptimizerConfig(learning_rate=1e-2, warmup_steps=1)
    assert record.learning_rates == [config.learning_rate_at(step, 4) for step in range(4)]


def test_a_horizon_is_needed(batch: dict[str, torch.Tensor]) -> None:
    with pytest.raises(UserError, match="learning rate needs a horizon"):
        toy_trainer(max_epochs=1).fit(toy_module(), DataLoader([batch], batch_size=None))


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(corpus: Path) -> None:
    module = toy_module(toy_backbone(vocab_size=299))
    for run in (Trainer.fit, Trainer.validate, Trainer.test):
        with pytest.raises(UserError, match="vocab_size must be at least the tokenizer's 300, got 299"):
            run(toy_trainer(), module, datamodule=toy_data(corpus))


def test_shapes_that_differ_are_listed() -> None:
    ours = {"a": (2, 3), "b": (1,), "c": (4,)}
    theirs = {"a": (2, 4), "c": (4,), "d": (1,)}
    with pytest.raises(UserError) as caught:
        check_shapes(ours, theirs, "a.ckpt")
    for part in (
        "a.ckpt is of another model",
        "b is missing",
        "d is not in this model",
        "a is (2, 4) in the checkpoint, (2, 3) in this model",
    ):
        assert part in str(caught.value)
    with pytest.raises(UserError, match=r"and 3 more"):
        check_shapes({f"w{i}": (1,) for i in range(8)}, {}, "a.ckpt")
    check_shapes({"a": (1,)}, {"a": (1,)}, "a.ckpt")
