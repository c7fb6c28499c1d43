"""Small models of every strategy, at odd sizes."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

import kvpath.attention
from kvpath.attention.strategy import AttentionStrategy
from kvpath.errors import UserError
from kvpath.model.config import BackboneConfig
from kvpath.model.decoder import Decoder

VOCAB_SIZE = 13
D_MODEL = 10
N_LAYERS = 5
"""Divided by neither 2, 3 nor 4, so that the last path or group of layers is shorter."""

SMALL: tuple[dict[str, int], ...] = (
    dict(n_heads=3, n_kv_heads=3, head_dim=6, delta_dim=2, latent_dim=7, rotary_dim=4, path_length=3, group_size=2),
    dict(n_heads=4, n_kv_heads=2, head_dim=10, delta_dim=4, latent_dim=9, rotary_dim=2, path_length=2, group_size=3),
    dict(n_heads=3, n_kv_heads=1, head_dim=8, delta_dim=6, latent_dim=5, rotary_dim=0, path_length=4, group_size=4),
)
"""Values for the fields of strategies by their names, three sets: key/value heads of all, some and one."""

WINDOWS = (3, 4, 5)


@dataclass(frozen=True)
class Toy:
    """A strategy in a toy model."""

    name: str
    attention: AttentionStrategy
    n_layers: int = 3

    def __str__(self) -> str:
        return self.name

    def config(self, **changes: Any) -> BackboneConfig:
        """Odd sizes, and weights large enough for attention to be far from uniform."""
        plain = dict(vocab_size=VOCAB_SIZE, d_model=D_MODEL, n_layers=self.n_layers, d_ff=7, pad_vocab_to=5)
        return BackboneConfig(**{**plain, "init_std": 0.3, "attention": self.attention, **changes})

    def decoder(self, dtype: torch.dtype = torch.float64, seed: int = 1, **changes: Any) -> Decoder:
        """The same weights for the same toy and seed; the gains of the norms are not one."""
        model = Decoder(self.config(**changes)).to(dtype)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                scale, centre = (0.3, 0.0) if parameter.dim() > 1 else (0.2, 1.0)
                noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
                parameter.copy_(centre + scale * noise)
        return model


def tokens(*shape: int, seed: int = 2) -> Tensor:
    """Token ids."""
    return torch.randint(0, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(seed))


def concrete_strategies() -> list[type[AttentionStrategy]]:
    """Every strategy that can be instantiated: all of kvpath's, and a user's that are imported."""
    for module in pkgutil.iter_modules(kvpath.attention.__path__, "kvpath.attention."):
        importlib.import_module(module.name)
    found = {cls for cls in _below(AttentionStrategy) if not inspect.isabstract(cls)}
    return sorted(found, key=lambda cls: (cls.__module__, cls.__qualname__))


def toys_of(strategy: type[AttentionStrategy]) -> list[Toy]:
    """Toy models of a strategy: of its own `examples()`, else of small values for its fields.

    Raises:
        UserError: it has no examples, and a field for which no small value is known.
    """
    examples = list(strategy.examples()) or _derived(strategy)
    return [Toy(f"{strategy.__name__}-{number}", example, N_LAYERS) for number, example in enumerate(examples, 1)]


def toys_of_config(config: BackboneConfig) -> list[Toy]:
    """A model shrunk around its attention as it is, with fewer layers if that can be, and the toys of its strategy."""
    name = type(config.attention).__name__
    depth = config.n_layers
    for fewer in range(min(N_LAYERS, depth), depth):
        try:
            replace(config, n_layers=fewer, d_ff=1).layout()
        except UserError:  # a plan for one depth only
            continue
        depth = fewer
        break
    return [Toy(f"{name} as configured", config.attention, depth), *toys_of(type(config.attention))]


def _derived(strategy: type[AttentionStrategy]) -> list[AttentionStrategy]:
    made = []
    for values, window in zip(SMALL, WINDOWS, strict=True):
        known = {**values, "window": window}
        own = fields(strategy)
        required = [field.name for field in own if field.default is MISSING and field.default_factory is MISSING]
        unknown = [name for name in required if name not in known]
        if unknown:
            raise UserError(
                f"{strategy.__name__} is not covered: no small value is known for its field {unknown[0]}; give the"
                " class an examples() that returns a few small instances"
            )
        values_of: dict[str, Any] = {field.name: known[field.name] for field in own if field.name in known}
        made.append(strategy(**values_of))
    return made


def _below(cls: type) -> Iterator[type]:
    direct: list[type] = cls.__subclasses__()
    for below in direct:
        yield below
        yield from _below(below)
