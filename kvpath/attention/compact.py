"""What the compact modules of all strategies have in common: another way through the weights of a plain module."""

import inspect
from typing import Generic, Protocol, TypeVar

from torch import Tensor, nn

from kvpath.attention.context import Context
from kvpath.attention.product import Product
from kvpath.attention.tiles import attend_split

Plain = TypeVar("Plain", bound=nn.Module)


class CompactAttention(nn.Module, Generic[Plain]):
    """Uses a plain module without registering it, so it owns no parameters and follows every change of them.

    A subclass that derives weights holds them as non-persistent buffers.
    """

    def __init__(self, plain: Plain) -> None:
        super().__init__()
        self._unregistered = (plain,)

    @property
    def plain(self) -> Plain:
        """The module whose weights are used."""
        return self._unregistered[0]


class TakesProduct(Protocol):
    """A plain module that leaves the attention product to its caller."""

    def __call__(
        self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context, product: Product
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As any attention module."""
        ...


class SplitAttention(CompactAttention[nn.Module]):
    """A plain module with its product over parts: stored entries are read where they lie, nothing is joined.

    Beyond the cache it holds a tile of scores, and of entries if they are stored in a narrow dtype; entries that are
    all of one part meet many queries, or queries on a GPU, in torch's own kernels.
    """

    def forward(self, x_BTC: Tensor, read: tuple[Tensor, ...], context: Context) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As the plain module's."""
        plain: TakesProduct = self.plain
        return plain(x_BTC, read, context, product=attend_split)


def split(plain: nn.Module) -> nn.Module | None:
    """`SplitAttention` of a module that leaves its product to the caller; None for a subclass's that does not."""
    return SplitAttention(plain) if "product" in inspect.signature(plain.forward).parameters else None
