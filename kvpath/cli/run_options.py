"""What a command line says of a run beside the model, the data and the Trainer."""

from dataclasses import dataclass

from kvpath.errors import UserError


@dataclass(kw_only=True)
class Every:
    """How often: in optimizer steps, tokens or minutes ('500 steps', '10M tokens', '30 minutes')."""

    log: str = "10 steps"
    """Scalars."""

    validate: str = "500 steps"
    """Validation, with a text sample."""

    save: str = "30 minutes"
    """The checkpoint to resume from; one is always written at the end."""


@dataclass(kw_only=True)
class Sample:
    """The text sample at each validation.

    Raises:
        UserError: naming the field and the value.
    """

    prompt: str = ""
    """What to continue; empty starts a document."""

    tokens: int = 64
    """How many tokens to add."""

    temperature: float = 0.8
    """0 takes the likeliest token."""

    def __post_init__(self) -> None:
        UserError.raise_all(
            [f"sample.tokens must be positive, got {self.tokens}"] * (self.tokens < 1)
            + [f"sample.temperature must not be negative, got {self.temperature}"] * (self.temperature < 0)
        )
