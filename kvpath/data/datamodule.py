"""All of data/ behind one LightningDataModule."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, cast

import lightning.pytorch as pl

from kvpath.data.budget import Budget, Plan
from kvpath.data.cache import digest
from kvpath.data.corpus import Region, Split, TokenCorpus, build_corpus
from kvpath.data.loaders import EvaluationSchedule, StepLoader, TrainingSchedule
from kvpath.data.order import BlockOrder
from kvpath.data.packing import TokenRun, Windows
from kvpath.data.sources import Source
from kvpath.data.stream import StreamLoader
from kvpath.data.tokenizer import Tokenizer, TokenizerConfig
from kvpath.errors import UserError

EvaluationStage = Literal["validate", "test", "predict"]

_REGIONS_OF_STAGE: dict[str, list[Region]] = {
    "fit": ["train", "validation"],
    "validate": ["validation"],
    "test": ["test"],
    "predict": ["test"],
}


@dataclass(frozen=True)
class Evaluation:
    """One loader of an evaluation: a region of a corpus, read at one context length.

    Args:
        corpus: what the source is called.
        split: the region: validation or test.
        context: tokens in a window; windows do not overlap, so this is the stride too.
        n_tokens: tokens scored, over all ranks: all of the region but the first.
        n_bytes: UTF-8 bytes of the text that the scored tokens stand for.
    """

    corpus: str
    split: str
    context: int
    n_tokens: int
    n_bytes: int


class PackedText(pl.LightningDataModule):
    """Documents joined by the end-of-text token and cut into windows, none lost.

    One training batch is one whole optimizer step of this rank: ``tokens`` and ``labels``, (A, M, T) int64, with A
    micro-batches of M sequences of T = seq_len tokens. The loader is as long as the run and goes on at the trainer's
    ``global_step``. Evaluation batches are (M, T); labels of -100 are padding.

    After ``setup``: ``tokenizer``; in fit also ``plan``; and ``evaluations[stage]``, one for each loader of a stage.

    Args:
        source: documents to train on and, with holdout_every, to evaluate on.
        tokenizer: which tokenizer.
        seq_len: tokens in a training sequence.
        budget: tokens of the run and size of a step.
        validation: documents to validate on, instead of held-out ones.
        test: documents to test on, instead of held-out ones.
        holdout_every: of every so many documents of the source, one is for validation and one for testing.
        eval_contexts: context lengths to test at; by default seq_len alone. Validation is at seq_len.
        eval_batch_tokens: tokens in an evaluation batch (at least one window).
        eval_limit_tokens: evaluate on the first so many tokens of a region; null is all of it.
        seed: of the order of training windows.
        shuffle_block: training windows are shuffled in blocks of so many tokens, a multiple of seq_len; null is
            seq_len. Stages that state the same block see one stream of tokens, whatever their seq_len.
        start_tokens: tokens of that stream to pass over; null is none, or with init_from those that its run has seen.
        repeat: begin another epoch when the data ends before the budget; false refuses.
        num_workers: processes that read ahead, per loader.
        stream: tokenise while training instead of once before: for sources too large to keep. Windows come in the
            order of the source, and a resume reads again all that came before: exact, but slow.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: TokenizerConfig,
        seq_len: int,
        budget: Budget,
        validation: Source | None = None,
        test: Source | None = None,
        holdout_every: int | None = None,
        eval_contexts: list[int] | None = None,
        eval_batch_tokens: int = 8192,
        eval_limit_tokens: int | None = None,
        seed: int = 0,
        shuffle_block: int | None = None,
        start_tokens: int | None = None,
        repeat: bool = True,
        num_workers: int = 0,
        stream: bool = False,
    ) -> None:
        super().__init__()
        self.source = source
        self.tokenizer_config = tokenizer
        self.seq_len = seq_len
        self.budget = budget
        self._explicit_sources: dict[Region, Source | None] = {"validation": validation, "test": test}
        self.holdout_every = holdout_every
        self.eval_contexts = [seq_len] if eval_contexts is None else eval_contexts
        self.eval_batch_tokens = eval_batch_tokens
        self.eval_limit_tokens = eval_limit_tokens
        self.seed = seed
        self.shuffle_block = seq_len if shuffle_block is None else shuffle_block
        self.start_tokens = start_tokens or 0
        self.repeat = repeat
        self.num_workers = num_workers
        self.stream = stream
        UserError.raise_all(self._problems())
        self.tokenizer: Tokenizer
        self.plan: Plan
        self.evaluations: dict[EvaluationStage, list[Evaluation]] = {}
        self._evaluated: dict[EvaluationStage, list[Windows]] = {}
        self._training_windows: Windows
        self._training_tokens: int | None = None
        self.accepts_other_text = False
        """Whether a checkpoint that was trained on other text than ours may be gone on with."""

    def _problems(self) -> list[str]:
        at_least = {
            "seq_len": (self.seq_len, 1),
            "start_tokens": (self.start_tokens, 0),
            "holdout_every": (self.holdout_every, 3),
            "eval_batch_tokens": (self.eval_batch_tokens, 1),
            "eval_limit_tokens": (self.eval_limit_tokens, 1),
            "num_workers": (self.num_workers, 0),
            **{f"eval_contexts[{i}]": (context, 1) for i, context in enumerate(self.eval_contexts)},
        }
        problems = [
            f"{name} must be at least {least}, got {value}"
            for name, (value, least) in at_least.items()
            if value is not None and value < least
        ]
        if self.seq_len > 0 and (self.shuffle_block < 1 or self.shuffle_block % self.seq_len):
            problems.append(f"shuffle_block must be a multiple of seq_len {self.seq_len}, got {self.shuffle_block}")
        if not self.eval_contexts:
            problems.append("eval_contexts must name at least one context length, got []")
        if self.stream:
            if self.budget.tokens is None:
                problems.append("budget.tokens must be stated with stream: true, got null: a stream has no length")
            if self.tokenizer_config.is_trained_here:
                problems.append("tokenizer.name must name a finished tokenizer with stream: true, got 'train'")
            if self.holdout_every is not None and self.eval_limit_tokens is None:
                problems.append("eval_limit_tokens must be stated with stream: true and holdout_every, got null")
        return problems

    def prepare_data(self) -> None:
        """Download, train the tokenizer and tokenise, on one rank of each node: what is needed is then in the cache."""
        function = self.trainer.state.fn if self.trainer else None
        self._corpora(function.value if function else "fit", self.load_tokenizer())

    def setup(self, stage: str) -> None:
        """Map what ``prepare_data`` made (or make it), and work out the plan.

        Args:
            stage: fit, validate, test or predict.

        Raises:
            UserError: for whatever cannot be read or does not fit together.
        """
        self.tokenizer = self.load_tokenizer()
        corpora = self._corpora(stage, self.tokenizer)
        if stage == "fit":
            self._set_up_training(corpora.get("train"))
        self._set_up_evaluation("validate", corpora.get("validation"), [self.seq_len])
        self._set_up_evaluation("test", corpora.get("test"), self.eval_contexts)
        self._set_up_evaluation("predict", corpora.get("test"), self.eval_contexts)
        if stage != "fit" and not self.evaluations[cast(EvaluationStage, stage)]:
            region = "validation" if stage == "validate" else "test"
            raise UserError(f"there is nothing to {stage} on: state {region} (a source) or holdout_every")

    def state_dict(self) -> dict[str, str | int | None]:
        """What a checkpoint remembers of its text: the tokenizer and, unless it is a stream, the number of tokens."""
        return {"tokenizer": self.tokenizer.fingerprint, "training_tokens": self._training_tokens}

    def load_state_dict(self, state_dict: dict[str, str | int | None]) -> None:
        """Refuse a checkpoint that was trained on other text, whose configuration may well be the same.

        Raises:
            UserError: the tokenizer, or in training the number of tokens, is another.
        """
        if self.accepts_other_text:
            return
        if state_dict["tokenizer"] != self.tokenizer.fingerprint:
            raise UserError(
                f"data.tokenizer {self.tokenizer_config.name!r} is not the one that the checkpoint was trained with;"
                " state its tokenizer.json (in the run directory) as data.tokenizer.name, with vocab_size null"
            )
        before, now = state_dict["training_tokens"], self._training_tokens
        if before is not None and now is not None and before != now:
            raise UserError(
                f"data.source {self.source.label} had {before:,} training tokens when the run began and has {now:,}:"
                " that changes the data of a run; --allow '[data]' allows it"
            )

    def train_dataloader(self) -> StepLoader | StreamLoader:
        """Batches of whole optimizer steps: ``tokens`` and ``labels`` (A, M, T)."""
        if self.stream:
            return StreamLoader(
                self.source,
                self.tokenizer,
                self._split,
                self.plan,
                self._rank,
                self._steps_ahead,
                self.num_workers,
                self.start_tokens,
                self.repeat,
            )
        order = self._order(self._training_windows)
        schedule = TrainingSchedule(self.plan, order, self._rank, self._steps_ahead)
        return StepLoader(self._training_windows, schedule, self.num_workers)

    def val_dataloader(self) -> list[StepLoader]:
        """One loader for each of ``evaluations["validate"]``: (M, T)."""
        return self._evaluation_loaders("validate")

    def test_dataloader(self) -> list[StepLoader]:
        """One loader for each of ``evaluations["test"]``: (M, context)."""
        return self._evaluation_loaders("test")

    def predict_dataloader(self) -> list[StepLoader]:
        """One loader for each of ``evaluations["predict"]``: (M, context)."""
        return self._evaluation_loaders("predict")

    def _order(self, windows: Windows) -> BlockOrder:
        per_block = self.shuffle_block // self.seq_len
        # A stage before may have ended within a window of this one's length: go on with the next whole window.
        start = -(-self.start_tokens // self.seq_len)
        return BlockOrder(windows.n_windows, per_block, self.seed, start)

    @property
    def _split(self) -> Split:
        return Split(self.holdout_every)

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def _steps_ahead(self) -> range:
        """The steps that training has still to run. Lightning restores ``global_step`` before it iterates."""
        done = self.trainer.global_step if self.trainer else 0
        # Lightning sets this attribute without declaring it
        overfit: int | float = getattr(self.trainer, "overfit_batches", 0)
        if overfit:
            n = min(overfit, self.plan.steps) if isinstance(overfit, int) else int(overfit * self.plan.steps)
            return range(done % n, n)
        return range(done, self.plan.steps)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer alone; one that is trained here is trained unless the cache has it."""
        if not self.tokenizer_config.is_trained_here:
            return self.tokenizer_config.load()
        split = self._split
        fingerprint = digest(self.source.fingerprint(), dataclasses.asdict(split))
        return self.tokenizer_config.load(lambda: split.documents(self.source, "train"), fingerprint)

    def _corpora(self, stage: str, tokenizer: Tokenizer) -> dict[Region, TokenCorpus]:
        """The regions that a stage reads, tokenised: made on first use, then found in the cache."""
        corpora: dict[Region, TokenCorpus] = {}
        for region in _REGIONS_OF_STAGE[stage]:
            explicit = self._explicit_sources.get(region)
            split = Split(rest=region) if explicit else self._kept_split
            if region in split.regions:
                corpora[region] = build_corpus(explicit or self.source, tokenizer, split)[region]
        return corpora

    @property
    def _kept_split(self) -> Split:
        """What of the source is tokenised once and kept: of a stream only the held-out documents, as far as needed."""
        if not self.stream:
            return self._split
        limit = None if self.eval_limit_tokens is None else self.eval_limit_tokens + 1
        return Split(self.holdout_every, rest=None, limit_tokens=limit)

    def _set_up_training(self, corpus: TokenCorpus | None) -> None:
        if corpus is None:
            self.plan = self.budget.plan(self.seq_len, self._world_size)
            return
        n_tokens = self._training_tokens = corpus.manifest.n_tokens
        windows = Windows(corpus.tokens, self.seq_len)
        where = f"source {corpus.manifest.label}: its {n_tokens} training tokens are fewer than"
        if windows.n_windows == 0:
            raise UserError(f"{where} one window: seq_len {self.seq_len} needs {self.seq_len + 1}")
        if windows.n_windows * self.seq_len < self.shuffle_block:
            raise UserError(f"{where} one shuffle_block of {self.shuffle_block}")
        order = self._order(windows)
        per_epoch = order.n * self.seq_len
        self.plan = self.budget.plan(self.seq_len, self._world_size, per_epoch + 1)
        if order.n < self.plan.sequences_per_step:
            raise UserError(f"{where} one optimizer step: it needs {self.plan.tokens_per_step + 1}")
        if order.epoch(self.plan.steps * self.plan.sequences_per_step - 1) > 0 and not self.repeat:
            left = max(0, per_epoch - self.start_tokens)
            raise UserError(
                f"source {corpus.manifest.label} ends before data.budget.tokens {self.plan.tokens}: an epoch has"
                f" {per_epoch}, of which {left} are left after data.start_tokens {self.start_tokens};"
                " data.repeat: true begins a second epoch"
            )
        self._training_windows = windows

    def _set_up_evaluation(self, stage: EvaluationStage, corpus: TokenCorpus | None, contexts: list[int]) -> None:
        self.evaluations[stage], self._evaluated[stage] = [], []
        if corpus is None:
            return
        manifest = corpus.manifest
        tokens: TokenRun = corpus.tokens
        if self.eval_limit_tokens is not None and self.eval_limit_tokens + 1 < manifest.n_tokens:
            tokens = corpus.tokens[: self.eval_limit_tokens + 1]
            n_bytes = self.tokenizer.count_bytes(tokens[1:])
        else:
            n_bytes = manifest.n_bytes - self.tokenizer.count_bytes(tokens[:1])
        n_tokens = max(0, len(tokens) - 1)
        UserError.raise_all(
            f"{manifest.label}, {manifest.region}: {n_tokens} tokens to score are fewer than one window of {context}"
            for context in contexts
            if n_tokens < context
        )
        for context in contexts:
            self.evaluations[stage].append(Evaluation(manifest.label, manifest.region, context, n_tokens, n_bytes))
            self._evaluated[stage].append(Windows(tokens, context, short_last=True))

    def _evaluation_loaders(self, stage: EvaluationStage) -> list[StepLoader]:
        return [self._evaluation_loader(windows) for windows in self._evaluated[stage]]

    def _evaluation_loader(self, windows: Windows) -> StepLoader:
        per_batch = max(1, self.eval_batch_tokens // windows.context)
        schedule = EvaluationSchedule(windows.n_windows, per_batch, self._rank, self._world_size)
        return StepLoader(windows, schedule, self.num_workers)
