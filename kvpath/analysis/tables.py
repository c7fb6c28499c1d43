"""Rows as an aligned plain-text table, CSV or JSON."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby

from kvpath.analysis.audit import Audit

Cell = str | int | float

CONVENTION = """\
Stored: elements of keys and values that the cache holds, per token of context. Read: elements that a decoding step
reads, per token of context; each layer counts every stored element its attention must touch once. With windows, both
are the total at the context over the context. Allocated: what the cache of one row takes in memory, its positions
included, over its tokens, which are the context in whole blocks of 256. Beyond weights and cache, decoding keeps the
compact bytes, weights that its modules derive, and one layer's attention holds the step bytes at once, for one row.
FLOPs per token: a multiply-add is 2; matrix products only, the output head included. Attention counts visible keys:
(T+1)/2 on average under the causal mask for T = context, fewer in a window. Training is 3 x forward, recomputation
apart. Decoding is one step that sees the whole context; every weight is met once, and latents are not expanded.\
"""


def table(rows: Sequence[Mapping[str, Cell]]) -> str:
    """Columns from the keys of the first row: text on the left, numbers on the right with thousands separated."""
    if not rows:
        return ""
    columns = list(rows[0])
    cells = [columns, *([_text(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    right = [not isinstance(rows[0][column], str) for column in columns]

    def line(parts: Sequence[str]) -> str:
        padded = [
            part.rjust(width) if numeric else part.ljust(width)
            for part, width, numeric in zip(parts, widths, right, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * width for width in widths), *map(line, cells[1:])])


def as_csv(rows: Sequence[Mapping[str, Cell]]) -> str:
    """One header line, one line a row; no numbers are rounded."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def format_audits(audits: Sequence[Audit], form: str, extra: Sequence[Mapping[str, Cell]] | None = None) -> str:
    """Audits as `table` (rounded, with the convention below), `csv` or `json` (complete).

    Args:
        audits: one for each row.
        form: table, csv or json.
        extra: further columns of each row.
    """
    more = extra or [{}] * len(audits)
    if form == "json":
        return json.dumps(
            [asdict(audit) | dict(columns) for audit, columns in zip(audits, more, strict=True)], indent=2
        )
    if form == "csv":
        return as_csv([_flat(audit) | dict(columns) for audit, columns in zip(audits, more, strict=True)])
    rows = [_short(audit) | dict(columns) for audit, columns in zip(audits, more, strict=True)]
    return f"{table(rows)}\n\n{CONVENTION}"


def widths_text(widths: Sequence[int]) -> str:
    """Widths per layer, equal neighbours together: `1792 x 10, 1791 x 2`."""
    runs = [(width, len(list(run))) for width, run in groupby(widths)]
    return str(runs[0][0]) if len(runs) == 1 else ", ".join(f"{width} x {count}" for width, count in runs)


def _flat(audit: Audit) -> dict[str, Cell]:
    """All fields, parts as columns of their own."""
    row: dict[str, Cell] = {}
    for key, value in asdict(audit).items():
        if key == "parameters_by_part":
            row |= {f"parameters_{part}": count for part, count in value.items()}
        else:
            row[key] = widths_text(value) if key == "d_ff" else value
    return row


def _short(audit: Audit) -> dict[str, Cell]:
    """What a table on a screen shows."""
    return {
        "name": audit.name,
        "parameters": audit.parameters,
        **audit.parameters_by_part,
        "d_ff": widths_text(audit.d_ff),
        "context": audit.context,
        "stored": audit.stored_elements_per_token,
        "read": audit.read_elements_per_token,
        f"bytes ({audit.dtype})": audit.stored_bytes_per_token,
        "allocated bytes": audit.allocated_bytes_per_token,
        "compact bytes": audit.compact_bytes,
        "step bytes": audit.step_bytes,
        "forward MFLOP": audit.forward_flops_per_token / 1e6,
        "training MFLOP": audit.training_flops_per_token / 1e6,
        "decode MFLOP": audit.decode_flops_per_token / 1e6,
    }


def _text(value: Cell) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
