"""The figures that the paper prints, each under the table that it stands in, and the budgets of its models."""

from dataclasses import dataclass, field
from typing import Any

CORPORA = ("C4", "FineWeb-Edu", "Wikipedia", "PG-19")
"""The columns of the tables of results, before the average."""

CONTEXTS = (2048, 8192, 32768)


@dataclass(frozen=True)
class Budget:
    """What makes a run one of the paper's: the layout, its size, and the tokens it was trained on."""

    layout: str
    """The strategy's class."""

    parameters: int
    values: dict[str, Any] = field(default_factory=dict)
    """Fields of the strategy."""

    stored: int | None = None
    """Elements of the cache per token of context."""

    d_model: int | None = 512
    n_layers: int | None = 12
    seq_len: int | None = 32768
    """Of the last stage."""

    tokens: float = 12e9
    """Of all stages together: 10B at 2K, 1B at 8K, 1B at 32K."""


@dataclass(frozen=True)
class Printed:
    """A table of perplexities: each model's on every corpus, and their average, at each context."""

    label: str
    """Of the table in the paper's source."""

    title: str
    reference: str
    """What gains are relative to."""

    models: dict[str, Budget]
    rows: dict[tuple[int, str], tuple[float, ...]]
    """By context and model: CORPORA, then the average."""

    gains: dict[str, tuple[float, ...]]
    """What the text says of averages relative to the reference, percent less at each of CONTEXTS."""


_CONCAT = {"n_heads": 8, "n_kv_heads": 4, "head_dim": 160, "delta_dim": 32, "path_length": 4}

MAIN = Printed(
    "tab:main-results",
    "Main results",
    "GQA",
    {
        "GQA": Budget("GQA", 98_710_016, {"n_heads": 8, "n_kv_heads": 4, "head_dim": 64}, 6_144),
        "CLA": Budget("CLA", 98_710_016, {"n_heads": 8, "n_kv_heads": 4, "head_dim": 256, "group_size": 4}, 6_144),
        "KVPath-Concat": Budget("KVPathConcat", 98_710_016, _CONCAT, 6_144),
        "KVPath-Residual": Budget("KVPathResidual", 98_710_016, _CONCAT, 6_144),
    },
    {
        (2048, "GQA"): (35.67, 21.94, 32.56, 33.58, 30.94),
        (2048, "CLA"): (36.22, 22.41, 33.13, 35.11, 31.72),
        (2048, "KVPath-Concat"): (33.81, 20.89, 32.35, 32.87, 29.98),
        (2048, "KVPath-Residual"): (34.21, 21.05, 32.61, 33.71, 30.40),
        (8192, "GQA"): (34.42, 21.14, 30.82, 31.10, 29.37),
        (8192, "CLA"): (34.91, 21.56, 31.20, 32.67, 30.08),
        (8192, "KVPath-Concat"): (32.50, 20.04, 30.34, 30.30, 28.29),
        (8192, "KVPath-Residual"): (32.93, 20.24, 30.74, 31.11, 28.76),
        (32768, "GQA"): (34.15, 20.95, 30.38, 30.68, 29.04),
        (32768, "CLA"): (34.57, 21.33, 30.67, 32.22, 29.70),
        (32768, "KVPath-Concat"): (32.23, 19.80, 29.59, 29.36, 27.75),
        (32768, "KVPath-Residual"): (32.65, 20.02, 30.19, 30.41, 28.32),
    },
    {"KVPath-Concat": (3.09, 3.65, 4.45), "KVPath-Residual": (1.75, 2.08, 2.48)},
)

MLA = Printed(
    "tab:mla-results",
    "MLA results",
    "MLA",
    {
        "MLA": Budget("MLA", 99_694_592, {"n_heads": 8, "head_dim": 64, "latent_dim": 128, "rotary_dim": 32}, 1_920),
        "KVPath-MLA": Budget(
            "KVPathMLA",
            99_694_592,
            {"n_heads": 8, "head_dim": 64, "latent_dim": 384, "delta_dim": 32, "path_length": 4},
            1_920,
        ),
    },
    {
        (2048, "MLA"): (36.27, 22.22, 32.22, 34.88, 31.40),
        (2048, "KVPath-MLA"): (35.14, 21.63, 30.74, 32.80, 30.08),
        (8192, "MLA"): (34.91, 21.37, 30.48, 32.18, 29.74),
        (8192, "KVPath-MLA"): (33.82, 20.78, 28.86, 30.05, 28.38),
        (32768, "MLA"): (34.63, 21.15, 30.08, 31.28, 29.28),
        (32768, "KVPath-MLA"): (33.52, 20.55, 28.36, 29.34, 27.95),
    },
    {"KVPath-MLA": (4.20, 4.57, 4.57)},
)


def _ablation(parameters: int, stored: int, **changed: int) -> Budget:
    return Budget("KVPathConcat", parameters, {**_CONCAT, **changed}, stored)


ABLATION_LABEL = "tab:ablation-results"

ABLATIONS = {
    "Reference (g=4, d_s=32)": _ablation(98_710_016, 6_144),
    "g=2": _ablation(100_282_880, 9_216, path_length=2),
    "g=8": _ablation(98_185_728, 5_120, path_length=8),
    "No grouping (g=12)": _ablation(97_661_440, 4_096, path_length=12),
    "d_s=16": _ablation(96_350_720, 4_608, head_dim=144, delta_dim=16),
    "d_s=64": _ablation(103_428_608, 9_216, head_dim=192, delta_dim=64),
}

ABLATION_REFERENCE = (21.1444, 20.3029, 20.4338)
"""Printed for the reference at CONTEXTS, as reproduced from the main table, in which they do not stand."""

BILLION_LABEL = "tab:scaling-results"

BILLION = {
    "GQA": Budget("GQA", 1_000_000_000, d_model=None, n_layers=None, seq_len=None, tokens=100e9),
    "KVPath-I": Budget("KVPathConcat", 1_000_000_000, d_model=None, n_layers=None, seq_len=None, tokens=100e9),
}
"""Planned: the paper prints neither caches nor perplexities."""
