"""How keys and values are made, shared and stored across layers: the contract, one file a family, the accounting."""

from kvpath.attention.cla import CLA
from kvpath.attention.context import Context, History, Index
from kvpath.attention.gqa import GQA
from kvpath.attention.kvpath_concat import KVPathConcat
from kvpath.attention.kvpath_mla import KVPathMLA
from kvpath.attention.kvpath_residual import KVPathResidual
from kvpath.attention.kvpath_rolling import KVPathRolling
from kvpath.attention.layout import Heads, LayerLayout, Layout, Read, Slot
from kvpath.attention.mla import MLA
from kvpath.attention.output import DenseOutput, OutputProjection
from kvpath.attention.path import PathStrategy
from kvpath.attention.product import Segment, attend
from kvpath.attention.strategy import AttentionStrategy, Backbone, split_heads

__all__ = [
    "CLA",
    "GQA",
    "MLA",
    "AttentionStrategy",
    "Backbone",
    "Context",
    "DenseOutput",
    "Heads",
    "History",
    "Index",
    "KVPathConcat",
    "KVPathMLA",
    "KVPathResidual",
    "KVPathRolling",
    "LayerLayout",
    "Layout",
    "OutputProjection",
    "PathStrategy",
    "Read",
    "Segment",
    "Slot",
    "attend",
    "split_heads",
]
