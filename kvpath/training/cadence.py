"""How often something happens: in optimizer steps, tokens or minutes, never in micro-batches."""

import math
import re
import time
from dataclasses import dataclass

from kvpath.errors import UserError

_UNITS = {"step": "steps", "token": "tokens", "minute": "minutes"}
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


@dataclass(frozen=True)
class Cadence:
    """An amount of one unit, such as 500 steps, 10M tokens or 30 minutes."""

    amount: float
    unit: str

    @classmethod
    def parse(cls, text: str, field: str) -> "Cadence":
        """Read `"500 steps"`, `"10M tokens"`, `"30 minutes"`.

        Raises:
            UserError: naming the field and the value.
        """
        match = re.fullmatch(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([kmb]?)\s*(step|token|minute)s?\s*", text.lower())
        if match:
            number, factor, unit = match.groups()
            amount = float(re.sub("[_,]", "", number)) * _FACTORS[factor]
            if amount > 0:
                return cls(amount, _UNITS[unit])
        raise UserError(f"{field} must be like '500 steps', '10M tokens' or '30 minutes', got {text!r}")

    def in_steps(self, tokens_per_step: int) -> int | None:
        """Optimizer steps between two times; None if it goes by the clock."""
        if self.unit == "minutes":
            return None
        return max(1, math.ceil(self.amount / (tokens_per_step if self.unit == "tokens" else 1)))


class Clock:
    """Says when a cadence is due."""

    def __init__(self, cadence: Cadence, tokens_per_step: int) -> None:
        self.steps = cadence.in_steps(tokens_per_step)
        self.seconds = cadence.amount * 60
        self._last = time.monotonic()

    @property
    def by_time(self) -> bool:
        """Whether it goes by the clock, so that ranks must agree on it."""
        return self.steps is None

    def due(self, step: int) -> bool:
        """Whether it is due after `step` optimizer steps; by the clock: since it last was."""
        if self.steps is not None:
            return step % self.steps == 0
        if time.monotonic() - self._last < self.seconds:
            return False
        self._last = time.monotonic()
        return True
