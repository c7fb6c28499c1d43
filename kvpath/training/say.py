"""Lines for people, from the first rank only, on standard error: standard output is for results."""

import sys

from lightning.pytorch.utilities.rank_zero import rank_zero_only


@rank_zero_only
def rank_zero_say(text: str) -> None:
    """Print one line."""
    print(text, file=sys.stderr, flush=True)
