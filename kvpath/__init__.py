"""kvpath: train, measure and run transformers whose layers share keys and values."""

from typing import TYPE_CHECKING, Any

from kvpath.errors import UserError
from kvpath.version import __version__

if TYPE_CHECKING:
    from kvpath.analysis.audit import audit
    from kvpath.config import build_model, load_config
    from kvpath.inference.load import load

__all__ = ["UserError", "__version__", "audit", "build_model", "load", "load_config"]

_WHERE = {
    "audit": "kvpath.analysis.audit",
    "build_model": "kvpath.config",
    "load": "kvpath.inference.load",
    "load_config": "kvpath.config",
}


def __getattr__(name: str) -> Any:
    """Import torch only when something needs it."""
    if name not in _WHERE:
        raise AttributeError(f"module 'kvpath' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)
