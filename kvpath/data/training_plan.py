"""Whether a corpus is enough for the run that is asked for."""

from kvpath.data.budget import Plan
from kvpath.data.order import BlockOrder
from kvpath.data.packing import Packing
from kvpath.data.regions import Manifest
from kvpath.errors import UserError


def check_length(corpus: Manifest, windows: Packing, shuffle_block: int) -> None:
    """Refuse a corpus of less than one sequence or one block.

    Raises:
        UserError: naming both numbers.
    """
    if windows.n_windows == 0:
        raise UserError(f"{_fewer(corpus)} one window: seq_len {windows.context} needs {windows.context + 1}")
    if windows.n_windows * windows.context < shuffle_block:
        raise UserError(f"{_fewer(corpus)} one shuffle_block of {shuffle_block}")


def check_budget(corpus: Manifest, plan: Plan, order: BlockOrder, start_tokens: int, repeat: bool) -> None:
    """Refuse a corpus of less than one step, or one that ends before the run where it must not come round again.

    Raises:
        UserError: naming the numbers.
    """
    if order.n < plan.sequences_per_step:
        raise UserError(f"{_fewer(corpus)} one optimizer step: it needs {plan.tokens_per_step + 1}")
    if order.epoch(plan.steps * plan.sequences_per_step - 1) > 0 and not repeat:
        per_epoch = order.n * plan.seq_len
        left = max(0, per_epoch - start_tokens)
        raise UserError(
            f"source {corpus.label} ends before data.budget.tokens {plan.tokens}: an epoch has"
            f" {per_epoch}, of which {left} are left after data.start_tokens {start_tokens};"
            " data.repeat: true begins a second epoch"
        )


def _fewer(corpus: Manifest) -> str:
    return f"source {corpus.label}: its {corpus.n_tokens} training tokens are fewer than"
