"""The least a training step can take: its matrix products and attention calls alone, and nothing in between."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
MATRIX_PRODUCTS = (
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.addmm_.default,
    aten.baddbmm.default,
)
ATTENTION = "aten::_scaled_dot_product"
"""How the names of all fused attention products begin, forward and backward."""


@dataclass(frozen=True)
class Like:
    """A tensor by its looks."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Call:
    """One product as it was called, its tensors by their looks alone."""

    operation: Callable[..., object]
    arguments: tuple[object, ...]
    keywords: tuple[tuple[str, object], ...]

    @property
    def name(self) -> str:
        """Such as aten::mm."""
        return str(getattr(self.operation, "name", lambda: self.operation)())

    @property
    def flops(self) -> int:
        """Of a matrix product, a multiply-add being 2; 0 for attention, whose kernels skip what is hidden."""
        if self.name.startswith(ATTENTION):
            return 0
        first, second = [part for part in self.arguments if isinstance(part, Like)][-2:]
        return 2 * first.shape.numel() * second.shape[-1]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in MATRIX_PRODUCTS or func.name().startswith(ATTENTION):
            keywords = tuple((name, _looks(value)) for name, value in kwargs.items() if value is not None)
            self.calls.append(Call(func, tuple(map(_looks, args)), keywords))
        return func(*args, **kwargs)


def record_products(step: Callable[[], object]) -> list[Call]:
    """The products that `step` runs, forward and backward, in order; attention without a fused kernel shows as bmm."""
    with _Recorder() as recorder:
        step()
    return recorder.calls


def bare_loop(calls: Sequence[Call]) -> Callable[[], None]:
    """A function that makes the same calls on random tensors of the same sizes and strides, and does nothing else."""
    pool: dict[tuple[int, Like], Tensor] = {}

    def real(position: int, value: object) -> object:
        if not isinstance(value, Like):
            return value
        if (position, value) not in pool:
            empty = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device)
            pool[position, value] = empty.normal_() if value.dtype.is_floating_point else empty.fill_(1)
        return pool[position, value]

    ready = [
        (
            call.operation,
            [real(position, value) for position, value in enumerate(call.arguments)],
            {name: real(-1, value) for name, value in call.keywords},
        )
        for call in calls
    ]

    def run() -> None:
        with torch.no_grad():
            for operation, arguments, keywords in ready:
                operation(*arguments, **keywords)

    return run


def _looks(value: object) -> object:
    if isinstance(value, Tensor):
        return Like(value.shape, value.stride(), value.dtype, value.device)
    return tuple(value) if isinstance(value, list) else value
