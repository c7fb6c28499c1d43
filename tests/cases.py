"""Toy instances of every strategy, for the tests that must hold whatever the layout: a new strategy is added here."""

import pytest

from kvpath.attention import (
    CLA,
    GQA,
    MLA,
    KVPathConcat,
    KVPathMLA,
    KVPathResidual,
    KVPathRolling,
)
from kvpath.testing.toys import D_MODEL, VOCAB_SIZE, tokens
from kvpath.testing.toys import Toy as Case
from tests.attention.strategies import LocalHistory, RunningState, SharedUpper, WindowedGQA

__all__ = ["CASES", "CONTRACT", "D_MODEL", "SHIPPED", "VOCAB_SIZE", "Case", "every_case", "tokens"]

SHIPPED = [
    Case("gqa-all", GQA(n_heads=3, n_kv_heads=3, head_dim=6)),
    Case("gqa-some", GQA(n_heads=4, n_kv_heads=2, head_dim=6)),
    Case("gqa-one", GQA(n_heads=3, n_kv_heads=1, head_dim=10)),
    Case("concat-all", KVPathConcat(n_heads=3, n_kv_heads=3, head_dim=7, delta_dim=2, path_length=3)),
    Case("concat-some", KVPathConcat(n_heads=4, n_kv_heads=2, head_dim=9, delta_dim=6, path_length=2), n_layers=5),
    Case("concat-one", KVPathConcat(n_heads=3, n_kv_heads=1, head_dim=5, delta_dim=4, path_length=4)),
    Case("mla", MLA(n_heads=3, head_dim=5, latent_dim=7)),
    Case("mla-rotary", MLA(n_heads=3, head_dim=5, latent_dim=7, rotary_dim=4)),
    Case("mla-query-latent", MLA(n_heads=2, head_dim=5, latent_dim=9, rotary_dim=2, q_latent_dim=3)),
    Case("cla-all", CLA(n_heads=3, n_kv_heads=3, head_dim=6, owners=[0, 1, 0, 1]), n_layers=4),
    Case("cla-some", CLA(n_heads=4, n_kv_heads=2, head_dim=6, group_size=2), n_layers=5),
    Case("cla-one", CLA(n_heads=3, n_kv_heads=1, head_dim=10, group_size=3), n_layers=4),
    Case("residual-all", KVPathResidual(n_heads=3, n_kv_heads=3, head_dim=6, delta_dim=5, path_length=3), n_layers=5),
    Case("residual-some", KVPathResidual(n_heads=4, n_kv_heads=2, head_dim=10, delta_dim=3, path_length=4), n_layers=6),
    Case("residual-one", KVPathResidual(n_heads=3, n_kv_heads=1, head_dim=4, delta_dim=1, path_length=7), n_layers=4),
    Case("rolling-all", KVPathRolling(n_heads=3, n_kv_heads=3, head_dim=6, delta_dim=2, path_length=3), n_layers=5),
    Case("rolling-some", KVPathRolling(n_heads=4, n_kv_heads=2, head_dim=10, delta_dim=4, path_length=6), n_layers=7),
    Case("rolling-one", KVPathRolling(n_heads=3, n_kv_heads=1, head_dim=8, delta_dim=6, path_length=4), n_layers=4),
    Case("kvpath-mla", KVPathMLA(n_heads=3, head_dim=5, latent_dim=7, delta_dim=4, path_length=2), n_layers=5),
    Case("kvpath-mla-long", KVPathMLA(n_heads=2, head_dim=3, latent_dim=9, delta_dim=6, path_length=4), n_layers=4),
]
"""At least one of every strategy that kvpath ships; paths that do not divide the layers among them."""

CONTRACT = [
    Case("windowed", WindowedGQA(n_heads=4, n_kv_heads=2, head_dim=6, window=3), n_layers=4),
    Case("shared-upper", SharedUpper(n_heads=4, n_kv_heads=2, head_dim=6, window=3, middle=2), n_layers=5),
    Case("running-state", RunningState(n_heads=4, n_kv_heads=2, head_dim=6, delta_dim=3)),
    Case(
        "local-history",
        LocalHistory(n_heads=4, n_kv_heads=2, head_dim=6, window=3, middle=1, d_source=D_MODEL),
        n_layers=4,
    ),
    Case(
        "local-history-shared",
        LocalHistory(n_heads=4, n_kv_heads=2, head_dim=6, window=3, middle=1, share=2, d_source=D_MODEL),
        n_layers=5,
    ),
]
"""Strategies of the tests' own that use the rest of the contract."""

CASES = [*SHIPPED, *CONTRACT]

every_case = pytest.mark.parametrize("case", CASES, ids=str)
