"""From what is to be evaluated on, be it regions, texts or a task, to windows of tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from kvpath.data.evaluations import EvaluatedText, evaluate_at, named
from kvpath.data.regions import Corpus, Region
from kvpath.data.retrieval import Task
from kvpath.data.retrieval.evaluation import task_mixed, tasks_at
from kvpath.data.stage_evaluations import EvaluationStage, Pair
from kvpath.data.tokenizer import Tokenizer
from kvpath.errors import UserError


@dataclass(frozen=True)
class EvaluationReader:
    """How it is read, whatever it is.

    Args:
        tokenizer: whose tokens they are of.
        seq_len: the context length of validation.
        contexts: the context lengths of testing.
        stride: tokens from one window to the next in testing; None is the context.
        limit_tokens: score the first so many tokens of a region; None is all of it.
        documents_alone: documents do not see each other.
        through_cache: what a task asks for in testing is answered from the cache.
    """

    tokenizer: Tokenizer
    seq_len: int
    contexts: list[int]
    stride: int | None
    limit_tokens: int | None
    documents_alone: bool
    through_cache: bool

    def pairs(
        self, stage: str, corpora: Mapping[Region, Corpus], texts: Mapping[str, EvaluatedText], task: Task | None
    ) -> dict[EvaluationStage, Sequence[Pair]]:
        """All that there is for each stage that may follow.

        Args:
            stage: what is set up: fit, validate, test or predict.
            corpora: regions, tokenised.
            texts: what this stage is evaluated on instead, by name; empty for nothing.
            task: the source, if it is one; it is used where there is no text.

        Raises:
            UserError: for whatever cannot be read or is shorter than a window.
        """
        validation = self._region([self.seq_len], corpora.get("validation"))
        test = self._region(self.contexts, corpora.get("test"), self.stride)
        found: dict[EvaluationStage, Sequence[Pair]] = {"validate": validation, "test": test, "predict": test}
        evaluated = cast(EvaluationStage, "validate" if stage == "fit" else stage)
        if texts:
            found[evaluated] = self._texts(texts)
        elif task is not None and not found[evaluated]:
            found[evaluated] = self._task(evaluated, task)
        return found

    def _region(self, contexts: list[int], corpus: Corpus | None, stride: int | None = None) -> list[Pair]:
        return [] if corpus is None else self._at(contexts, corpus, self.limit_tokens, stride)

    def _task(self, stage: EvaluationStage, task: Task) -> Sequence[Pair]:
        if stage == "validate":
            return [task_mixed(task, "validation", self.seq_len, self.tokenizer)]
        return tasks_at(self.contexts, task, "test", self.tokenizer, self.through_cache)

    def _texts(self, texts: Mapping[str, EvaluatedText]) -> list[Pair]:
        pairs: list[Pair] = []
        problems = []
        for name, text in texts.items():
            try:
                pairs += self._text(name, text)
            except UserError as error:
                problems.append(str(error))
        UserError.raise_all(problems)
        return pairs

    def _text(self, name: str, text: EvaluatedText) -> Sequence[Pair]:
        if isinstance(text.source, Task):
            with named(name):
                return tasks_at(self.contexts, text.source, text.region, self.tokenizer, self.through_cache, name)
        return self._at(self.contexts, text.corpus(name, self.tokenizer), text.limit_tokens, self.stride, name)

    def _at(
        self, contexts: list[int], corpus: Corpus, limit: int | None, stride: int | None, name: str | None = None
    ) -> list[Pair]:
        return evaluate_at(contexts, corpus, self.tokenizer, limit, self.documents_alone, stride, name)
