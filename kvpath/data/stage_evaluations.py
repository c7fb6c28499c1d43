"""What each stage is evaluated on, and a loader for each."""

from collections.abc import Mapping, Sequence
from typing import Literal

from kvpath.data.evaluations import Evaluation, EvaluationWindows
from kvpath.data.loaders import EvaluationSchedule, StepLoader
from kvpath.data.ranks import Ranks
from kvpath.data.retrieval.examples import Examples

EvaluationStage = Literal["validate", "test", "predict"]

Pair = tuple[Evaluation, EvaluationWindows]
"""What is said of a loader, and what it reads."""


class StageEvaluations:
    """Keeps what is said of a loader and what it reads together, so that some can be left out.

    Args:
        pairs: of each stage, one for each loader, in their order.
    """

    def __init__(self, pairs: Mapping[EvaluationStage, Sequence[Pair]]) -> None:
        self._pairs = dict(pairs)

    @property
    def evaluations(self) -> dict[EvaluationStage, list[Evaluation]]:
        """What is said of the loaders of each stage."""
        return {stage: [evaluation for evaluation, _ in pairs] for stage, pairs in self._pairs.items()}

    def windows(self, stage: EvaluationStage) -> list[EvaluationWindows]:
        """What the loaders of a stage read."""
        return [windows for _, windows in self._pairs[stage]]

    def leave_out(self, stage: EvaluationStage, done: list[Evaluation]) -> None:
        """Have no loaders of some evaluations of a stage."""
        self._pairs[stage] = [pair for pair in self._pairs[stage] if pair[0] not in done]

    def loaders(
        self, stage: EvaluationStage, batch_tokens: int, ranks: Ranks, num_workers: int, end_of_text: int | None
    ) -> list[StepLoader]:
        """A loader for each evaluation of a stage: (M, context).

        Args:
            stage: which.
            batch_tokens: tokens in a batch, of at least one window.
            ranks: share the windows.
            num_workers: processes that read ahead, per loader.
            end_of_text: the token that ends a document, if documents are to stand alone; a task has none.
        """
        loaders = []
        for windows in self.windows(stage):
            per_batch = max(1, batch_tokens // windows.context)
            schedule = EvaluationSchedule(windows.n_windows, per_batch, ranks.rank, ranks.count)
            end = None if isinstance(windows, Examples) else end_of_text
            loaders.append(StepLoader(windows, schedule, num_workers, end))
        return loaders
