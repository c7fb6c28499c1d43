"""The paper's models, whose every cost is known by hand."""

from typing import Any

from kvpath.attention import (
    CLA,
    GQA,
    MLA,
    AttentionStrategy,
    KVPathConcat,
    KVPathMLA,
    KVPathResidual,
    KVPathRolling,
)
from kvpath.model import BackboneConfig

PATH: dict[str, Any] = {"n_heads": 8, "n_kv_heads": 4, "head_dim": 160, "delta_dim": 32, "path_length": 4}

ATTENTION: dict[str, AttentionStrategy] = {
    "mha": GQA(n_heads=8, n_kv_heads=8, head_dim=64),
    "gqa": GQA(n_heads=8, n_kv_heads=4, head_dim=64),
    "mqa": GQA(n_heads=8, n_kv_heads=1, head_dim=64),
    "mqa_wide": GQA(n_heads=8, n_kv_heads=1, head_dim=256),
    "cla": CLA(n_heads=8, n_kv_heads=4, head_dim=256, group_size=4),
    "concat": KVPathConcat(**PATH),
    "residual": KVPathResidual(**PATH),
    "rolling": KVPathRolling(**PATH),
    "mla": MLA(n_heads=8, head_dim=64, latent_dim=128, rotary_dim=32),
    "kvpath_mla": KVPathMLA(n_heads=8, head_dim=64, latent_dim=384, delta_dim=32, path_length=4),
}


def paper(attention: AttentionStrategy, d_ff: int | list[int] | str = 64, **changes: Any) -> BackboneConfig:
    """12 layers of width 512."""
    plain = {"vocab_size": 50257, "d_model": 512, "n_layers": 12, "d_ff": d_ff, "attention": attention}
    return BackboneConfig(**{**plain, **changes})
