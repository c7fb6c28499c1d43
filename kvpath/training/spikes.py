"""Steps that are not taken: a loss or gradient that is not finite, and a loss that jumps."""

import copy
import json
import math
import statistics
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer

from kvpath.errors import UserError
from kvpath.model.batch import Batch
from kvpath.training.bad_batch import as_put_aside
from kvpath.training.module import LanguageModel
from kvpath.training.saving import Saving, saving_of
from kvpath.training.say import rank_zero_say
from kvpath.training.stored_config import read_checkpoint

Action = Literal["stop", "skip", "back"]
"""stop: end the run, its last checkpoint as it is. skip: leave the step out. back: take up the weights and moments of
the last checkpoint, and so leave out all steps since. Steps that are left out count: data and schedule move on."""

GIVE_UP_AFTER = 10
"""Steps in a row that may be left out."""


@dataclass(frozen=True, kw_only=True)
class SpikeRule:
    """A loss is a spike if it is above the mean of the last steps by so many of their standard deviations.

    Raises:
        UserError: naming the field and the value.
    """

    action: Literal["none", "stop", "skip", "back"] = "none"
    """What to do then: nothing, or as on_nan."""

    deviations: float = 6.0
    """How many."""

    steps: int = 128
    """How many steps, of those that were taken; nothing is a spike before there are as many."""

    def __post_init__(self) -> None:
        UserError.raise_all(
            [f"on_spike.deviations must be positive, got {self.deviations}"] * (not self.deviations > 0)
            + [f"on_spike.steps must be at least 2, got {self.steps}"] * (self.steps < 2)
        )


class Spikes(Callback):
    """Judges each step before the optimizer takes it, on all ranks alike.

    The batch of a step that is not taken is put aside by every rank, and a line says what happened. What is left out
    and the losses that are compared with are part of a checkpoint, and one is written after going back: a resumed run
    decides as the unbroken one. Needs `Saving` beside it.
    """

    def __init__(self, run: Path, on_nan: Action = "stop", on_spike: SpikeRule = SpikeRule()) -> None:  # noqa: B008 (it is frozen)
        """What to do.

        Args:
            run: Where `events.jsonl` and the folder `bad_batches` go.
            on_nan: What to do if the loss or the gradient is not finite.
            on_spike: What a spike is, and what to do then.
        """
        self.run, self.on_nan, self.on_spike = run, on_nan, on_spike
        self.losses: deque[float] = deque(maxlen=on_spike.steps)
        """Of the last steps that were taken."""
        self.left_out: list[tuple[int, int]] = []
        """The first and the last step of each range that was left out, from 1."""
        self._in_a_row = 0
        self._saving: Saving

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Be asked from now on."""
        assert isinstance(pl_module, LanguageModel)
        self._saving = saving_of(trainer, "Spikes")
        pl_module.judge = partial(self._judge, trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Be asked no longer."""
        assert isinstance(pl_module, LanguageModel)
        pl_module.judge = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Be asked no longer."""
        self.on_fit_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """What later decisions depend on."""
        return {
            "losses": list(self.losses),
            "left_out": [list(steps) for steps in self.left_out],
            "in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.losses = deque(state_dict["losses"], maxlen=self.on_spike.steps)
        self.left_out = [(first, last) for first, last in state_dict["left_out"]]
        self._in_a_row = state_dict["in_a_row"]

    def _judge(self, trainer: Trainer, module: LanguageModel, batch: Batch, loss: float, gradient_norm: float) -> bool:
        found = self._what_is_wrong(loss, gradient_norm)
        if found is None:
            self.losses.append(loss)
            self._in_a_row = 0
            return True
        reason, action = found
        step, last = trainer.global_step + 1, self._saving.last
        self._in_a_row += 1
        if self._in_a_row > GIVE_UP_AFTER:
            reason, action = f"{reason}, and {GIVE_UP_AFTER} steps before it were left out", "stop"
        if action == "back" and not last.exists():
            reason, action = f"{reason}, and there is no checkpoint to go back to yet", "skip"
        first = step
        if action == "back":
            first = self._go_back(trainer, module) + 1
        self._put_aside(trainer, batch, step, reason)
        self._write_event(trainer, step, first, action, reason, loss, gradient_norm)
        if action == "stop":
            raise UserError(
                f"step {step:,}: {reason}; its batch is in {self.run / 'bad_batches'} (kvpath inspect looks into it),"
                f" and {f'{last} is as it was' if last.exists() else 'there is no checkpoint yet'}"
            )
        self.left_out = [steps for steps in self.left_out if steps[1] < first] + [(first, step)]
        return False

    def _what_is_wrong(self, loss: float, gradient_norm: float) -> tuple[str, Action] | None:
        for name, value in (("loss", loss), ("norm of the gradient", gradient_norm)):
            if not math.isfinite(value):
                return f"the {name} is {value}", self.on_nan
        rule = self.on_spike
        if rule.action != "none" and len(self.losses) == rule.steps:
            mean, deviation = statistics.fmean(self.losses), statistics.pstdev(self.losses)
            if loss > mean + rule.deviations * deviation:
                above = f"mean {mean:.4f}, standard deviation {deviation:.4f} of the last {rule.steps} steps"
                return f"the loss jumped to {loss:.4f} ({above})", rule.action
        return None

    def _go_back(self, trainer: Trainer, module: LanguageModel) -> int:
        """Take weights, moments and losses from the last checkpoint; gives its step."""
        stored = read_checkpoint(self._saving.last)
        if (go_back_to := getattr(trainer.strategy, "go_back_to", None)) is not None:
            go_back_to(self._saving.last)
        else:
            module.load_state_dict(stored["state_dict"])
            # The file is mapped; moments would go on pointing into it.
            trainer.strategy.load_optimizer_state_dict(copy.deepcopy({"optimizer_states": stored["optimizer_states"]}))
        then = stored["callbacks"].get(self.state_key, {"losses": []})
        self.losses = deque(then["losses"], maxlen=self.on_spike.steps)
        self._saving.due = True
        return int(stored["global_step"])

    def _put_aside(self, trainer: Trainer, batch: Batch, step: int, reason: str) -> None:
        facts = dict(step=step, rank=trainer.global_rank, reason=reason, precision=str(trainer.precision))
        as_put_aside(batch, getattr(trainer, "datamodule", None), **facts).write(self.run / "bad_batches")

    def _write_event(
        self, trainer: Trainer, step: int, first: int, action: Action, reason: str, loss: float, gradient_norm: float
    ) -> None:
        did = {
            "stop": "the run stops",
            "skip": "the step is left out",
            "back": f"back to the weights of step {first - 1:,}, past the batches of steps {first:,} to {step:,}",
        }
        rank_zero_say(f"step {step:,}: {reason}: {did[action]}")
        if trainer.is_global_zero:
            event = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "step": step,
                "action": action,
                "left_out": None if action == "stop" else [first, step],
                "reason": reason,
                # JSON has no word for what is not finite.
                "loss": loss if math.isfinite(loss) else str(loss),
                "gradient_norm": gradient_norm if math.isfinite(gradient_norm) else str(gradient_norm),
            }
            with (self.run / "events.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
