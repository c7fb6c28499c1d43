"""What the models of many runs cost, counted once for each that differs."""

import json
from dataclasses import dataclass
from typing import Any

from kvpath.analysis.audit import count_parameters, on_meta
from kvpath.attention.accounting import read_elements, stored_elements
from kvpath.attention.layout import Layout
from kvpath.config import backbone_from

BYTES = 2
"""Of an element of the cache, which tables and figures count in BF16, as the paper does."""


@dataclass(frozen=True)
class Costs:
    """As `kvpath audit` counts them, at the context of training."""

    parameters: int
    stored: float
    """Elements of the cache per token of context."""

    read: float
    """Elements that a decoding step reads, per token of context."""

    @property
    def stored_bytes(self) -> float:
        """Bytes of the cache per token of context, in BF16."""
        return BYTES * self.stored

    @property
    def read_bytes(self) -> float:
        """Bytes that a decoding step reads, per token of context, in BF16."""
        return BYTES * self.read


class Counter:
    """Counts each model once, on the meta device, whatever the number of its runs and stages."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, Layout]] = {}

    def costs(self, backbone: dict[str, Any], context: int) -> Costs:
        """Of a model given by the plain values of a configuration.

        Raises:
            UserError: they are none of a model.
        """
        # The longest context of a stage changes neither weights nor layout.
        values = {key: value for key, value in backbone.items() if key != "max_seq_len"}
        key = json.dumps(values, sort_keys=True, default=str)
        if key not in self._known:
            model = on_meta(backbone_from(values))
            self._known[key] = count_parameters(model), model.layout
        parameters, layout = self._known[key]
        return Costs(parameters, stored_elements(layout, context), read_elements(layout, context))
