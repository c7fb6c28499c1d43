import math

import pytest
import torch
from torch import nn

from kvpath.errors import UserError
from kvpath.training import OptimizerConfig
from tests.training.toys import toy_module


def test_only_matrices_decay() -> None:
    decoder = toy_module().decoder
    decayed, plain = OptimizerConfig(weight_decay=0.3).build(decoder).param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {parameter.dim() for parameter in decayed["params"]} == {2}
    assert {parameter.dim() for parameter in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(decoder.parameters()))


def test_tied_weights_are_decayed_once() -> None:
    module = nn.Module()
    module.one = nn.Linear(3, 4)
    module.two = nn.Linear(3, 4, bias=False)
    module.two.weight = module.one.weight
    decayed, plain = OptimizerConfig().build(module).param_groups
    assert (len(decayed["params"]), len(plain["params"])) == (1, 1)


def test_frozen_weights_are_left_out() -> None:
    module = nn.Linear(3, 4)
    module.bias.requires_grad_(False)
    assert [len(group["params"]) for group in OptimizerConfig().build(module).param_groups] == [1, 0]


def test_adamw_has_the_settings_of_the_papers() -> None:
    optimizer = OptimizerConfig().build(nn.Linear(2, 2))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.9, 0.95), 1e-8)
    assert OptimizerConfig().weight_decay == 0.1
    assert OptimizerConfig().clip_norm == 1.0


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (8, 0.1 + 0.9 * 0.5), (6, 0.1 + 0.45 * (1 + math.sqrt(0.5))), (12, 0.1)],
)
def test_schedule_at_steps_worked_out_by_hand(step: int, expected: float) -> None:
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=4, final_fraction=0.1)
    assert config.learning_rate_at(step, total_steps=12) == pytest.approx(2.0 * expected, rel=1e-12)


def test_schedule_without_warm_up_starts_at_the_peak_and_never_rises_after_the_end() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0)
    assert config.learning_rate_at(0, 10) == 1.0
    assert config.learning_rate_at(50, 10) == pytest.approx(0.1)


def test_every_mistake_is_named() -> None:
    with pytest.raises(UserError) as caught:
        OptimizerConfig(learning_rate=0, warmup_steps=-1, final_fraction=2, betas=(0.9, 1.0), clip_norm=0)
    for field in ("learning_rate", "warmup_steps", "final_fraction", "betas", "clip_norm"):
        assert f"optimizer.{field}" in str(caught.value)
