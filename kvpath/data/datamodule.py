"""All of data/ behind one LightningDataModule."""

import dataclasses
from typing import Any, Literal, cast

import lightning.pytorch as pl

from kvpath.data.best_fit import BestFit
from kvpath.data.budget import Budget, Plan
from kvpath.data.cache import digest
from kvpath.data.checkpoint_checks import check_ranks, check_tokenizer, check_tokens
from kvpath.data.evaluation_reader import EvaluationReader
from kvpath.data.evaluations import EvaluatedText, Evaluation
from kvpath.data.field_checks import field_problems
from kvpath.data.lane_reader import StreamSettings
from kvpath.data.lanes import check_lanes
from kvpath.data.loaders import RecordingLoader, StepLoader, TrainingSchedule
from kvpath.data.mapped import FirstTokens, documents_in
from kvpath.data.order import BlockOrder
from kvpath.data.packing import Packing, TokenRun, Windows
from kvpath.data.ranks import Ranks
from kvpath.data.record import StreamRecord, as_hex
from kvpath.data.regions import Corpus, Manifest, Region, Split
from kvpath.data.retrieval import Task
from kvpath.data.sources import Source
from kvpath.data.stage_evaluations import EvaluationStage, StageEvaluations
from kvpath.data.stage_regions import StageRegions
from kvpath.data.stream import StreamLoader
from kvpath.data.tokenizer import Tokenizer, TokenizerConfig
from kvpath.data.training_plan import check_budget, check_length
from kvpath.errors import UserError


class PackedText(pl.LightningDataModule):
    """Documents, each with its end-of-text token, packed into sequences, none lost.

    One training batch is one whole optimizer step of this rank: ``tokens`` and ``labels``, (A, M, T) int64, with A
    micro-batches of M sequences of T = seq_len tokens, and with document_masking ``documents`` and ``positions`` of the
    same shape. The loader is as long as the run and goes on at the trainer's ``global_step``. Evaluation batches are
    (M, T); labels of -100 are not scored.

    After ``setup``: ``tokenizer``; in fit also ``plan``; and ``evaluations[stage]``, one for each loader of a stage.

    Args:
        source: documents to train on and, with holdout_every, to evaluate on.
        tokenizer: which tokenizer.
        seq_len: tokens in a training sequence.
        budget: tokens of the run and size of a step.
        validation: documents to validate on, instead of held-out ones.
        test: documents to test on, instead of held-out ones.
        evaluate: what to test on instead of either: names of one's own for texts, tested one after the other.
        holdout_every: of every so many documents of the source, one is for validation and one for testing. Prepared
            shards know theirs: state the same or null.
        max_tokens: train on so many tokens of the source at most, and on whole documents; null is all of it.
        eval_contexts: context lengths to test at; by default seq_len alone. Validation is at seq_len.
        eval_stride: tokens from one window to the next in testing, at most the shortest of eval_contexts: windows
            overlap, and each token is scored once, by the first window that holds it. Null is the context: they do not.
        eval_batch_tokens: tokens in an evaluation batch (at least one window).
        eval_limit_tokens: evaluate on the first so many tokens of a region; null is all of it.
        seed: of the order of training windows.
        shuffle_block: training windows are shuffled in blocks of so many tokens, a multiple of seq_len; null is
            seq_len. Stages that state the same block see one stream of tokens, whatever their seq_len.
        start_tokens: tokens of that stream to pass over; null is none, or with init_from those that its run has seen.
        repeat: begin another epoch when the data ends before the budget; false refuses.
        num_workers: processes that read ahead, per loader.
        stream: tokenise while training instead of once before: for sources too large to keep. Sequences are not
            shuffled. Each lane passes over an equal share of start_tokens: with one lane that is exact, with more a
            stage that follows another may read a sequence a lane again, or pass over one.
        lanes: a stream's documents are dealt to so many lanes in turn, each packed on its own, and sequences are taken
            from the lanes in turn. Ranks x num_workers must divide it, and then do not matter.
        packing: contiguous joins documents and cuts the whole into sequences; best_fit puts whole documents into
            sequences where they fit, cuts only those that are longer, lets no document's end predict the beginning of
            what stands after it, and fills up with padding, which counts as tokens of the budget.
        packing_documents: best_fit packs so many documents together (of a lane, in a stream).
        document_masking: in training, attention does not cross documents, positions count from 0 in each, and no
            document's end predicts the next one's beginning.
        eval_document_masking: the same in evaluation. By default each token of a region but the first is scored once,
            in contiguous windows across documents, however the model was trained: results compare with any other's.
        eval_through_cache: what a task (Recall, Passkey) asks for is answered from the cache, as in generation: all up
            to the first question is read at once, then a token at a time. The accuracy should be the same.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: TokenizerConfig,
        seq_len: int,
        budget: Budget,
        validation: Source | None = None,
        test: Source | None = None,
        evaluate: dict[str, EvaluatedText] | None = None,
        holdout_every: int | None = None,
        max_tokens: int | None = None,
        eval_contexts: list[int] | None = None,
        eval_stride: int | None = None,
        eval_batch_tokens: int = 8192,
        eval_limit_tokens: int | None = None,
        seed: int = 0,
        shuffle_block: int | None = None,
        start_tokens: int | None = None,
        repeat: bool = True,
        num_workers: int = 0,
        stream: bool = False,
        lanes: int = 16,
        packing: Literal["contiguous", "best_fit"] = "contiguous",
        packing_documents: int = 1024,
        document_masking: bool = False,
        eval_document_masking: bool = False,
        eval_through_cache: bool = False,
    ) -> None:
        super().__init__()
        self.source = source
        self.tokenizer_config = tokenizer
        self.seq_len = seq_len
        self.budget = budget
        self._explicit_sources: dict[Region, Source | None] = {"validation": validation, "test": test}
        self.holdout_every = holdout_every
        self.max_tokens = max_tokens
        self.eval_contexts = [seq_len] if eval_contexts is None else eval_contexts
        self.evaluate = evaluate
        self.eval_stride = eval_stride
        self.eval_batch_tokens = eval_batch_tokens
        self.eval_limit_tokens = eval_limit_tokens
        self.seed = seed
        self.shuffle_block = seq_len if shuffle_block is None else shuffle_block
        self.start_tokens = start_tokens or 0
        self.repeat = repeat
        self.num_workers = num_workers
        self.stream = stream
        self.lanes = lanes
        self.packing = packing
        self.packing_documents = packing_documents
        self.document_masking = document_masking
        self.eval_document_masking = eval_document_masking
        self.eval_through_cache = eval_through_cache
        UserError.raise_all(field_problems(self))
        self.tokenizer: Tokenizer
        self.plan: Plan
        self._evaluated = StageEvaluations({})
        self._training_windows: Packing
        self._training_offsets: TokenRun | None = None
        self._record = StreamRecord()
        self._training_tokens: int | None = None
        self.accepts_other_text = False
        """Whether a checkpoint that was trained on other text than ours may be gone on with."""
        self.tokenizer_of_weights: str | None = None
        """Fingerprint of the tokenizer that the weights to evaluate were trained with, if it is known."""

    @property
    def asks(self) -> bool:
        """Whether testing is by tasks, which find an accuracy, and not by texts, which find a perplexity."""
        texts = [text.source for text in (self.evaluate or {}).values()]
        return any(isinstance(source, Task) for source in texts or [self._explicit_sources["test"] or self.source])

    def prepare_data(self) -> None:
        """Download, train the tokenizer and tokenise, on one rank of each node: what is needed is then in the cache."""
        function = self.trainer.state.fn if self.trainer else None
        stage = function.value if function else "fit"
        tokenizer = self._checked_tokenizer()
        self._corpora(stage, tokenizer)
        self._regions(stage).check()
        for name, text in self._texts(stage).items():
            if not isinstance(text.source, Task):
                text.corpus(name, tokenizer)
                text.check(name)

    def setup(self, stage: str) -> None:
        """Map what ``prepare_data`` made (or make it), and work out the plan.

        Args:
            stage: fit, validate, test or predict.

        Raises:
            UserError: for whatever cannot be read or does not fit together.
        """
        self.tokenizer = self._checked_tokenizer()
        corpora = self._corpora(stage, self.tokenizer)
        if stage == "fit":
            self._record = StreamRecord()
            self._set_up_training(corpora.get("train"))
        task = self.source if isinstance(self.source, Task) else None
        self._evaluated = StageEvaluations(self._reader().pairs(stage, corpora, self._texts(stage), task))
        if stage != "fit" and not self.evaluations[cast(EvaluationStage, stage)]:
            region = "validation" if stage == "validate" else "test"
            raise UserError(f"there is nothing to {stage} on: state {region} (a source) or holdout_every")

    @property
    def evaluations(self) -> dict[EvaluationStage, list[Evaluation]]:
        """Of each stage that may follow ``setup``, what its loaders read, in their order."""
        return self._evaluated.evaluations

    def leave_out(self, stage: EvaluationStage, done: list[Evaluation]) -> None:
        """Have no loaders of some of ``evaluations[stage]``, after ``setup``."""
        self._evaluated.leave_out(stage, done)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint remembers, for all ranks; every rank must call it.

        Of its text: the tokenizer and, unless it is a stream, the number of tokens. Of what was trained on: the step,
        the hash, and where the lanes of a stream stand, (lanes, 5).
        """
        own = self._record.places(self._ranks.steps_done)
        return {
            "tokenizer": self.tokenizer.fingerprint,
            "training_tokens": self._training_tokens,
            "step": self._ranks.steps_done,
            "stream_hash": self.stream_hash(),
            "lanes": None if own is None else self._ranks.dealt(own),
            "world_size": self._ranks.count,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in the data, and refuse a checkpoint that was trained on other text, or on a stream by other ranks.

        Raises:
            UserError: the tokenizer, or in training the number of tokens or of ranks, is another.
        """
        places = None if self.accepts_other_text else state_dict.get("lanes")
        if places is not None and self._ranks.fit:
            check_ranks(state_dict, self._ranks.count)
            places = places[self._ranks.rank :: self._ranks.count]
        self._record = StreamRecord.from_state(state_dict, places)
        if not self.accepts_other_text:
            check_tokenizer(state_dict["tokenizer"], self.tokenizer, self.tokenizer_config.name)
            check_tokens(state_dict, self._training_tokens, self.source)

    def stream_hash(self) -> str | None:
        """A hash of all tokens that were trained on, in their order; every rank must call it.

        Two runs with one data seed have the same, whatever their model, micro-batch, workers or ranks. None if it is
        not known, as after a resume from a checkpoint without one.
        """
        own = self._record.own_hash(self._ranks.steps_done, self._ranks.rank)
        return None if own is None else as_hex(self._ranks.total(own))

    def document_numbers(self) -> list[list[int]] | None:
        """Of each of this rank's sequences of the step that comes next: the numbers of its training documents, from 0.

        None for a stream.
        """
        if self._training_offsets is None:
            return None
        (step,) = self._steps_ahead()[:1]
        schedule = TrainingSchedule(self.plan, self._order(self._training_windows), self._ranks.rank, self._steps_ahead)
        windows = schedule.windows_of(range(step, step + 1)).ravel().tolist()
        return [documents_in(self._training_offsets, self._training_windows.spans(i)) for i in windows]

    def train_dataloader(self) -> StepLoader | StreamLoader:
        """Batches of whole optimizer steps: ``tokens`` and ``labels`` (A, M, T)."""
        end_of_text = self.tokenizer.end_of_text if self.document_masking else None
        counted = (self._record, self._steps_done, self.num_workers, end_of_text)
        if not self.stream:
            order = self._order(self._training_windows)
            schedule = TrainingSchedule(self.plan, order, self._ranks.rank, self._steps_ahead)
            return RecordingLoader(self._training_windows, schedule, *counted)
        settings = StreamSettings(
            self.source,
            self.tokenizer,
            self._split,
            self.seq_len,
            self.lanes,
            self.packing_documents if self.packing == "best_fit" else None,
            self.start_tokens,
            self.repeat,
        )
        settings.check()
        return StreamLoader(
            settings, self.plan, self._ranks.rank, self._steps_ahead, *counted, self._ranks.first_problem
        )

    def val_dataloader(self) -> list[StepLoader]:
        """One loader for each of ``evaluations["validate"]``: (M, T)."""
        return self._evaluation_loaders("validate")

    def test_dataloader(self) -> list[StepLoader]:
        """One loader for each of ``evaluations["test"]``: (M, context)."""
        return self._evaluation_loaders("test")

    def predict_dataloader(self) -> list[StepLoader]:
        """One loader for each of ``evaluations["predict"]``: (M, context)."""
        return self._evaluation_loaders("predict")

    def _order(self, windows: Packing) -> BlockOrder:
        per_block = self.shuffle_block // self.seq_len
        # A stage before may have ended within a window of this one's length: go on with the next whole window.
        start = -(-self.start_tokens // self.seq_len)
        return BlockOrder(windows.n_windows, per_block, self.seed, start)

    @property
    def _split(self) -> Split:
        return Split(self.holdout_every)

    @property
    def _ranks(self) -> Ranks:
        return Ranks(self.trainer)

    def _steps_done(self) -> int:
        return self._ranks.steps_done

    def _steps_ahead(self) -> range:
        return self._ranks.steps_ahead(self.plan.steps)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer alone; one that is trained here is trained unless the cache has it."""
        if (own := self.source.tokenizer(self.tokenizer_config.name)) is not None:
            return own
        if not self.tokenizer_config.is_trained_here:
            return self.tokenizer_config.load()
        split = self._split
        fingerprint = digest(self.source.fingerprint(), dataclasses.asdict(split))
        return self.tokenizer_config.load(lambda: split.documents(self.source, "train"), fingerprint)

    def _checked_tokenizer(self) -> Tokenizer:
        tokenizer = self.load_tokenizer()
        if self.tokenizer_of_weights is not None:
            check_tokenizer(self.tokenizer_of_weights, tokenizer, self.tokenizer_config.name)
        return tokenizer

    def _texts(self, stage: str) -> dict[str, EvaluatedText]:
        """What a stage is to be evaluated on instead of regions of its own."""
        return (self.evaluate or {}) if stage in ("test", "predict") else {}

    def _corpora(self, stage: str, tokenizer: Tokenizer) -> dict[Region, Corpus]:
        """The regions that a stage reads, tokenised: made on first use, then found in the cache."""
        corpora = self._regions(stage).corpora(tokenizer)
        if self.max_tokens is not None and "train" in corpora:
            corpora["train"] = FirstTokens(corpora["train"], self.max_tokens)
        return corpora

    def _regions(self, stage: str) -> StageRegions:
        if self._texts(stage):
            return StageRegions({})
        return StageRegions.of(stage, self.source, self._explicit_sources, self._kept_split)

    @property
    def _kept_split(self) -> Split:
        """What of the source is tokenised once and kept: of a stream only the held-out documents, as far as needed."""
        if not self.stream:
            return self._split
        limit = None if self.eval_limit_tokens is None else self.eval_limit_tokens + 1
        return Split(self.holdout_every, rest=None, limit_tokens=limit)

    def _set_up_training(self, corpus: Corpus | None) -> None:
        if isinstance(self.source, Task):
            examples = self.source.examples(self.tokenizer, "train", self.seq_len)
            self._plan_training(self.source.manifest(self.tokenizer, self.seq_len), examples)
            return
        if corpus is None:
            self.plan = self.budget.plan(self.seq_len, self._ranks.count)
            check_lanes(self.lanes, self._ranks.count, self.num_workers)
            return
        self._training_tokens, self._training_offsets = corpus.manifest.n_tokens, corpus.offsets
        self._plan_training(corpus.manifest, self._packed(corpus))

    def _plan_training(self, manifest: Manifest, windows: Packing) -> None:
        self._training_windows = windows
        check_length(manifest, windows, self.shuffle_block)
        order = self._order(windows)
        self.plan = self.budget.plan(self.seq_len, self._ranks.count, order.n * self.seq_len + 1)
        check_budget(manifest, self.plan, order, self.start_tokens, self.repeat)

    def _packed(self, corpus: Corpus) -> Packing:
        if self.packing == "contiguous":
            return Windows(corpus.tokens, self.seq_len)
        where = str(getattr(corpus, "directory", ""))
        key = digest(where, self.holdout_every, dataclasses.asdict(corpus.manifest))
        return BestFit(corpus, key, self.seq_len, self.packing_documents, self.tokenizer.end_of_text)

    def _reader(self) -> EvaluationReader:
        return EvaluationReader(
            self.tokenizer,
            self.seq_len,
            self.eval_contexts,
            self.eval_stride,
            self.eval_limit_tokens,
            self.eval_document_masking,
            self.eval_through_cache,
        )

    def _evaluation_loaders(self, stage: EvaluationStage) -> list[StepLoader]:
        end_of_text = self.tokenizer.end_of_text if self.eval_document_masking else None
        return self._evaluated.loaders(stage, self.eval_batch_tokens, self._ranks, self.num_workers, end_of_text)
