"""All of data/ behind one LightningDataModule."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, cast

import lightning.pytorch as pl

from kvpath.data.best_fit import BestFit
from kvpath.data.budget import Budget, Plan
from kvpath.data.cache import digest
from kvpath.data.evaluations import EvaluatedText, Evaluation, EvaluationWindows, evaluate_at, named
from kvpath.data.lane_reader import StreamSettings
from kvpath.data.lanes import check_lanes
from kvpath.data.loaders import EvaluationSchedule, RecordingLoader, StepLoader, TrainingSchedule
from kvpath.data.mapped import FirstTokens, documents_in
from kvpath.data.order import BlockOrder
from kvpath.data.packing import Packing, TokenRun, Windows
from kvpath.data.ranks import Ranks
from kvpath.data.record import StreamRecord, as_hex
from kvpath.data.regions import Corpus, Manifest, Region, Split
from kvpath.data.retrieval import Task
from kvpath.data.retrieval.evaluation import task_mixed, tasks_at
from kvpath.data.retrieval.examples import Examples
from kvpath.data.sources import Source
from kvpath.data.stream import StreamLoader
from kvpath.data.tokenizer import Tokenizer, TokenizerConfig
from kvpath.data.training_plan import check_budget, check_length
from kvpath.errors import UserError

EvaluationStage = Literal["validate", "test", "predict"]

_REGIONS_OF_STAGE: dict[str, list[Region]] = {
    "fit": ["train", "validation"],
    "validate": ["validation"],
    "test": ["test"],
    "predict": ["test"],
}

_TESTING: tuple[EvaluationStage, ...] = ("test", "predict")

_OTHER_TOKENIZER = (
    "data.tokenizer {!r} is not the one that the checkpoint was trained with; state its tokenizer.json (in the run"
    " directory) as data.tokenizer.name, with vocab_size null"
)


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
        UserError.raise_all(self._problems())
        self.tokenizer: Tokenizer
        self.plan: Plan
        self.evaluations: dict[EvaluationStage, list[Evaluation]] = {}
        self._evaluated: dict[EvaluationStage, list[EvaluationWindows]] = {}
        self._training_windows: Packing
        self._training_offsets: TokenRun | None = None
        self._record = StreamRecord()
        self._training_tokens: int | None = None
        self.accepts_other_text = False
        """Whether a checkpoint that was trained on other text than ours may be gone on with."""
        self.tokenizer_of_weights: str | None = None
        """Fingerprint of the tokenizer that the weights to evaluate were trained with, if it is known."""

    def _problems(self) -> list[str]:
        at_least = {
            "seq_len": (self.seq_len, 1),
            "start_tokens": (self.start_tokens, 0),
            "holdout_every": (self.holdout_every, 3),
            "max_tokens": (self.max_tokens, 1),
            "eval_batch_tokens": (self.eval_batch_tokens, 1),
            "eval_limit_tokens": (self.eval_limit_tokens, 1),
            "num_workers": (self.num_workers, 0),
            "lanes": (self.lanes, 1),
            "packing_documents": (self.packing_documents, 1),
            **{f"eval_contexts[{i}]": (context, 1) for i, context in enumerate(self.eval_contexts)},
        }
        problems = [
            f"{name} must be at least {least}, got {value}"
            for name, (value, least) in at_least.items()
            if value is not None and value < least
        ]
        if self.seq_len > 0 and (self.shuffle_block < 1 or self.shuffle_block % self.seq_len):
            problems.append(f"shuffle_block must be a multiple of seq_len {self.seq_len}, got {self.shuffle_block}")
        if self.eval_stride is not None and not 1 <= self.eval_stride <= min(self.eval_contexts, default=1):
            problems.append(
                f"eval_stride must be from 1 to the shortest of eval_contexts {self.eval_contexts},"
                f" got {self.eval_stride}"
            )
        if self.evaluate is not None and not self.evaluate:
            problems.append("evaluate must name at least one text, or be null, got {}")
        for name, text in (self.evaluate or {}).items():
            problems += text.problems(name)
        if len({isinstance(text.source, Task) for text in (self.evaluate or {}).values()}) > 1:
            problems.append(
                f"evaluate must name texts or tasks, got both in {sorted(self.evaluate or {})}: their results go to"
                " different files"
            )
        if self.asks and self.eval_stride is not None:
            problems.append(f"eval_stride must be null for tasks, got {self.eval_stride}")
        problems += self._problems_of_task()
        if not self.eval_contexts:
            problems.append("eval_contexts must name at least one context length, got []")
        if self.stream:
            if self.budget.tokens is None:
                problems.append("budget.tokens must be stated with stream: true, got null: a stream has no length")
            if self.max_tokens is not None:
                problems.append(
                    f"max_tokens must be null with stream: true, got {self.max_tokens}: state budget.tokens, or"
                    " max_documents of the source"
                )
            if self.tokenizer_config.is_trained_here:
                problems.append("tokenizer.name must name a finished tokenizer with stream: true, got 'train'")
            if self.holdout_every is not None and self.eval_limit_tokens is None:
                problems.append("eval_limit_tokens must be stated with stream: true and holdout_every, got null")
        return problems

    def _problems_of_task(self) -> list[str]:
        """Of a source that makes its sequences: most of what is about documents is not for it."""
        if not isinstance(self.source, Task):
            return []
        wanted = {
            "holdout_every": (self.holdout_every, None),
            "max_tokens": (self.max_tokens, None),
            "stream": (self.stream, False),
            "packing": (self.packing, "contiguous"),
            "document_masking": (self.document_masking, False),
        }
        return [f"source.{problem}" for problem in self.source.problems()] + [
            f"{name} must be {'null' if value is None else value} with source {self.source.label}, got {given}"
            for name, (given, value) in wanted.items()
            if given != value
        ]

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
        for source in {id(source): source for source, _ in self._kept(stage).values()}.values():
            source.check()
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
        self._set_up_evaluation("validate", corpora.get("validation"), [self.seq_len])
        for testing in _TESTING:
            self._set_up_evaluation(testing, corpora.get("test"), self.eval_contexts, self.eval_stride)
        if texts := self._texts(stage):
            self._set_up_texts(cast(EvaluationStage, stage), texts)
        elif isinstance(self.source, Task):
            self._set_up_task("validate" if stage == "fit" else cast(EvaluationStage, stage), self.source)
        if stage != "fit" and not self.evaluations[cast(EvaluationStage, stage)]:
            region = "validation" if stage == "validate" else "test"
            raise UserError(f"there is nothing to {stage} on: state {region} (a source) or holdout_every")

    def leave_out(self, stage: EvaluationStage, done: list[Evaluation]) -> None:
        """Have no loaders of some of ``evaluations[stage]``, after ``setup``."""
        pairs = zip(self.evaluations[stage], self._evaluated[stage], strict=True)
        kept = [(evaluation, windows) for evaluation, windows in pairs if evaluation not in done]
        self.evaluations[stage] = [evaluation for evaluation, _ in kept]
        self._evaluated[stage] = [windows for _, windows in kept]

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
            if state_dict["world_size"] != self._ranks.count:
                raise UserError(
                    f"data.stream: the checkpoint is of {state_dict['world_size']} ranks, and here are"
                    f" {self._ranks.count}: a stream goes on with as many ranks as it had; a tokenised corpus with any;"
                    " --allow '[data]' reads again all that came before"
                )
            places = places[self._ranks.rank :: self._ranks.count]
        self._record = StreamRecord.from_state(state_dict, places)
        if self.accepts_other_text:
            return
        if state_dict["tokenizer"] != self.tokenizer.fingerprint:
            raise UserError(_OTHER_TOKENIZER.format(self.tokenizer_config.name))
        before, now = state_dict["training_tokens"], self._training_tokens
        if before is not None and now is not None and before != now:
            raise UserError(
                f"data.source {self.source.label} had {before:,} training tokens when the run began and has {now:,}:"
                " that changes the data of a run; --allow '[data]' allows it"
            )

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
        if self.tokenizer_of_weights not in (None, tokenizer.fingerprint):
            raise UserError(_OTHER_TOKENIZER.format(self.tokenizer_config.name))
        return tokenizer

    def _texts(self, stage: str) -> dict[str, EvaluatedText]:
        """What a stage is to be evaluated on instead of regions of its own."""
        return (self.evaluate or {}) if stage in _TESTING else {}

    def _corpora(self, stage: str, tokenizer: Tokenizer) -> dict[Region, Corpus]:
        """The regions that a stage reads, tokenised: made on first use, then found in the cache."""
        corpora: dict[Region, Corpus] = {
            region: source.corpora(tokenizer, split)[region] for region, (source, split) in self._kept(stage).items()
        }
        if self.max_tokens is not None and "train" in corpora:
            corpora["train"] = FirstTokens(corpora["train"], self.max_tokens)
        return corpora

    def _kept(self, stage: str) -> dict[Region, tuple[Source, Split]]:
        """The regions that a stage reads and that are tokenised once: of which source, and how that is split."""
        kept: dict[Region, tuple[Source, Split]] = {}
        if self._texts(stage):
            return kept
        for region in _REGIONS_OF_STAGE[stage]:
            if explicit := self._explicit_sources.get(region):
                kept[region] = explicit, Split(rest=region)
            elif region in self.source.own_split(split := self._kept_split).regions:
                kept[region] = self.source, split
        return kept

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

    def _set_up_evaluation(
        self, stage: EvaluationStage, corpus: Corpus | None, contexts: list[int], stride: int | None = None
    ) -> None:
        found = [] if corpus is None else self._at(contexts, corpus, self.eval_limit_tokens, stride)
        self.evaluations[stage] = [evaluation for evaluation, _ in found]
        self._evaluated[stage] = [windows for _, windows in found]

    def _set_up_task(self, stage: EvaluationStage, task: Task) -> None:
        """Its own sequences, unless there is text to evaluate on."""
        if self.evaluations[stage]:
            return
        found: Sequence[tuple[Evaluation, EvaluationWindows]]
        if stage == "validate":
            found = [task_mixed(task, "validation", self.seq_len, self.tokenizer)]
        else:
            found = tasks_at(self.eval_contexts, task, "test", self.tokenizer, self.eval_through_cache)
        self.evaluations[stage] = [evaluation for evaluation, _ in found]
        self._evaluated[stage] = [windows for _, windows in found]

    def _set_up_texts(self, stage: EvaluationStage, texts: dict[str, EvaluatedText]) -> None:
        problems = []
        for name, text in texts.items():
            try:
                found = self._of_text(name, text)
            except UserError as error:
                problems.append(str(error))
                continue
            self.evaluations[stage] += [evaluation for evaluation, _ in found]
            self._evaluated[stage] += [windows for _, windows in found]
        UserError.raise_all(problems)

    def _of_text(self, name: str, text: EvaluatedText) -> Sequence[tuple[Evaluation, EvaluationWindows]]:
        if isinstance(text.source, Task):
            how = (self.tokenizer, self.eval_through_cache, name)
            with named(name):
                return tasks_at(self.eval_contexts, text.source, text.region, *how)
        corpus = text.corpus(name, self.tokenizer)
        return self._at(self.eval_contexts, corpus, text.limit_tokens, self.eval_stride, name)

    def _at(
        self, contexts: list[int], corpus: Corpus, limit: int | None, stride: int | None, name: str | None = None
    ) -> list[tuple[Evaluation, EvaluationWindows]]:
        return evaluate_at(contexts, corpus, self.tokenizer, limit, self.eval_document_masking, stride, name)

    def _evaluation_loaders(self, stage: EvaluationStage) -> list[StepLoader]:
        return [self._evaluation_loader(windows) for windows in self._evaluated[stage]]

    def _evaluation_loader(self, windows: EvaluationWindows) -> StepLoader:
        per_batch = max(1, self.eval_batch_tokens // windows.context)
        schedule = EvaluationSchedule(windows.n_windows, per_batch, self._ranks.rank, self._ranks.count)
        alone = self.eval_document_masking and not isinstance(windows, Examples)
        end_of_text = self.tokenizer.end_of_text if alone else None
        return StepLoader(windows, schedule, self.num_workers, end_of_text)
