"""What ZeRO cannot be made of, or not run with."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from torch.optim import Optimizer

from kvpath.errors import UserError

ELEMENTWISE = (
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "SGD",
    "RMSprop",
    "Adagrad",
    "FusedAdam",
    "DeepSpeedCPUAdam",
)
"""Optimizers whose update of an element needs that element alone: a rank may hold any slice of the parameters."""

_OURS = ("gradient_clipping", "gradient_accumulation_steps", "train_batch_size", "optimizer", "scheduler")
"""What is settled by the model's and the data's configuration."""


FIELDS = ("stage", "offload_parameters", "bucket_elements", "live_elements", "timeout_minutes", "config")
"""What `check_fields` looks at."""


def check_fields(
    stage: int,
    offload_parameters: bool,
    bucket_elements: int,
    live_elements: int,
    timeout_minutes: float,
    config: Mapping[str, Any] | None,
) -> None:
    """Refuse what `ZeRO` cannot be made of.

    Raises:
        UserError: naming the field and the value.
    """
    problems = [
        f"stage must be 1, 2 or 3, got {stage}" * (stage not in (1, 2, 3)),
        f"offload_parameters needs stage 3, got stage {stage}" * (offload_parameters and stage != 3),
        f"bucket_elements must be positive, got {bucket_elements}" * (bucket_elements < 1),
        f"live_elements must be positive, got {live_elements}" * (live_elements < 1),
        f"timeout_minutes must be positive, got {timeout_minutes}" * (not timeout_minutes > 0),
        *(
            f"config must not hold {key}: model.optimizer and data.budget settle it"
            for key in _OURS
            if key in (config or {})
        ),
    ]
    if stage == 1 and (config or {}).get("data_types", {}).get("grad_accum_dtype") not in (None, "bf16"):
        problems.append(
            "config must not hold data_types.grad_accum_dtype with stage 1, which DeepSpeed then leaves for another"
            " optimizer: stage 2 can"
        )
    UserError.raise_all(f"trainer.strategy ZeRO: {problem}" for problem in problems if problem)


def check_installed() -> None:
    """Refuse to train without DeepSpeed.

    Raises:
        UserError: how to install it.
    """
    if find_spec("deepspeed") is None:
        raise UserError("trainer.strategy ZeRO: DeepSpeed is not installed: pip install 'kvpath[deepspeed]'")


def check_can_be_sharded(optimizer: Optimizer, stage: int) -> None:
    """Refuse an optimizer that needs whole matrices.

    Raises:
        UserError: naming it.
    """
    if type(optimizer).__name__ not in ELEMENTWISE:
        raise UserError(
            f"the optimizer {type(optimizer).__name__} cannot be sharded by ZeRO stage {stage}: a rank updates a slice"
            f" of the flattened parameters, as {', '.join(ELEMENTWISE[:2])} or {ELEMENTWISE[5]} can"
        )
