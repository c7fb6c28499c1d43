"""Prints how far training on two ranks is off training on one, by layout and strategy: the table of docs/clusters.md.

python -m tests.training.zero_table
"""

import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.cases import SHIPPED
from tests.runs import write_corpus
from tests.training import zero_ranks
from tests.training.zero_ranks import EVERY, KINDS, on_ranks


def deviation(report: Mapping[str, Any], alone: Mapping[str, Any]) -> float:
    """The largest, relative, of all losses, gradient norms and sums of the validation."""
    pairs = [
        pair
        for name in ("losses", "gradient_norms", "validation")
        for pair in zip(report[name], alone[name], strict=True)
    ]
    return max(abs(found / expected - 1) for found, expected in pairs)


def main() -> None:
    """Train everything, and print."""
    worst: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder))
        reports = on_ranks(EVERY, corpus, Path(folder))
        for plan in EVERY:
            alone = zero_ranks.run(replace(plan, strategy="auto"), corpus, Path(folder) / "alone", ranks=1)
            row = worst[next(type(case.attention).__name__ for case in SHIPPED if case.name == plan.case)]
            row[plan.strategy] = max(row[plan.strategy], deviation(reports[str(plan)], alone))
    print(f"| layout | {' | '.join(KINDS)} |")
    print(f"|---|{'--:|' * len(KINDS)}")
    for layout, row in worst.items():
        print(f"| {layout} | {' | '.join(f'{row[kind]:.0e}' for kind in KINDS)} |")


if __name__ == "__main__":
    main()
