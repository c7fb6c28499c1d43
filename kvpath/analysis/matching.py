"""Widths of the SwiGLU that give a model a stated number of parameters."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvpath.analysis.audit import Audit, count_parameters, on_meta
from kvpath.errors import UserError
from kvpath.model.config import BackboneConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Match:
    """The widths that come nearest to a stated number of parameters without exceeding it."""

    widths: tuple[int, ...]
    """One for each layer; the lower layers take the remainder."""

    left_over: int
    """Parameters of the stated number that no width takes up: 0 for an exact match."""

    @property
    def d_ff(self) -> int | list[int]:
        """The widths as a config holds them: one number if all are equal."""
        return self.widths[0] if len(set(self.widths)) == 1 else list(self.widths)


def match_d_ff(config: BackboneConfig, parameters: int, multiple: int = 1) -> Match:
    """Solve the widths for a total of `parameters`.

    Args:
        config: the model; its own d_ff is not looked at.
        parameters: what the whole model's are to sum to.
        multiple: what every width is to be a multiple of.

    Raises:
        UserError: the rest of the model leaves too little for any width.
    """
    n_layers = config.n_layers
    if multiple < 1:
        raise UserError(f"d_ff_multiple must be positive, got {multiple}")
    narrowest = count_parameters(on_meta(replace(config, d_ff=multiple)))
    # Parameters of one step, in one layer.
    step = (count_parameters(on_meta(replace(config, d_ff=2 * multiple))) - narrowest) // n_layers
    spare = parameters - narrowest
    if spare < 0:
        raise UserError(
            f"parameters={parameters:,} is reached by no width: the nearest is {narrowest:,},"
            f" with d_ff {multiple} in every layer"
        )
    each, remainder = divmod(spare // step, n_layers)
    widths = tuple(multiple * (1 + each + (layer < remainder)) for layer in range(n_layers))
    return Match(widths, spare % step)


def resolve_widths(config: BackboneConfig) -> BackboneConfig:
    """The config with integers for `d_ff: match`; unchanged if it has them. What is left over is logged.

    Raises:
        UserError: no width reaches the config's parameters.
    """
    if config.d_ff != "match" or config.parameters is None:
        return config
    match = match_d_ff(config, config.parameters, config.d_ff_multiple)
    if match.left_over:
        logger.warning(
            "d_ff: match comes to %s parameters, %s less than the %s asked for",
            f"{config.parameters - match.left_over:,}",
            f"{match.left_over:,}",
            f"{config.parameters:,}",
        )
    return replace(config, d_ff=match.d_ff)


def refuse_unmatched(audits: Sequence[Audit]) -> None:
    """Whatever their parameters, models whose caches differ are not matched.

    Raises:
        UserError: stored elements per token differ; says which model has how many.
    """
    if len({audit.stored_elements_per_token for audit in audits}) > 1:
        stored = ", ".join(f"{audit.name} {audit.stored_elements_per_token:,}" for audit in audits)
        raise UserError(f"not matched: stored elements per token must be equal, got {stored}")
