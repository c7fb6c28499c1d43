"""The LightningModule: language modelling over any attention strategy."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from kvpath.errors import UserError
from kvpath.evaluation.perplexity import Perplexity, nll_of
from kvpath.evaluation.retrieval import Accuracy, as_in_generation, task_name
from kvpath.model.batch import Batch, index_of
from kvpath.model.config import BackboneConfig
from kvpath.model.decoder import Decoder
from kvpath.model.loss import IGNORE, LossSums
from kvpath.training.optimizer import OptimizerConfig
from kvpath.training.say import rank_zero_say
from kvpath.training.stepping import stepping_for
from kvpath.training.stored_config import FORMAT_VERSION, check_format, read_checkpoint, to_plain
from kvpath.version import __version__

Judge = Callable[[Batch, float, float], bool]
"""Whether a step is taken, by its batch, its loss in nats per token over all ranks, and the norm of its gradient."""


class Step(NamedTuple):
    """What one optimizer step reports. Sums are this rank's own."""

    nll: Tensor
    """Summed negative log-likelihood in nats."""

    scored: Tensor
    """Labels scored, over all ranks."""

    gradient_norm: Tensor
    """Global norm of the gradient before clipping."""

    learning_rate: float


class LanguageModel(LightningModule):
    """Trains a decoder on batches that are each one whole optimizer step of this rank.

    A batch holds `tokens` and `labels` of shape (A, M, T): A micro-batches of M sequences, accumulated. The loss is the
    sum over the valid labels divided by their number in the whole step, over all ranks and micro-batches, so that any
    split into ranks and micro-batches gives the same gradients. Labels of -100 are not scored.
    """

    def __init__(
        self,
        backbone: BackboneConfig,
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008 (it is frozen)
        z_loss: float = 0.0,
        seed: int = 0,
        compile: bool = False,
        activation_checkpointing: bool = False,
    ) -> None:
        """What to train and how.

        Args:
            backbone: The model.
            optimizer: AdamW and its schedule.
            z_loss: Weight of the squared log-partition function added to the loss; 0 for none.
            seed: Seed of the initial weights; the data has its own.
            compile: Run the model through torch.compile.
            activation_checkpointing: Recompute each block in the backward pass, to save memory.

        Raises:
            UserError: naming the field and the value.
        """
        super().__init__()
        UserError.raise_all(
            [f"model.z_loss must not be negative, got {z_loss}"] * (z_loss < 0)
            + [f"model.seed must not be negative, got {seed}"] * (seed < 0)
        )
        self.automatic_optimization = False
        self.backbone = backbone
        self.optimizer_config = optimizer
        self.z_loss = z_loss
        self.seed = seed
        self.compile_model = compile
        self.activation_checkpointing = activation_checkpointing
        self.model: Decoder | None = None
        self.scores: list[Perplexity | Accuracy] = []
        self.results: list[dict[str, Any]] = []
        """What the last evaluation found, one entry a loader. In testing each comes as soon as its loader has ended."""
        self.judge: Judge | None = None
        """Asked before each optimizer step, on every rank with the same numbers; None takes all."""
        backbone.layout()

    @property
    def decoder(self) -> Decoder:
        """The model, built if it is not yet."""
        self.configure_model()
        assert self.model is not None
        return self.model

    def configure_model(self) -> None:
        """Build the model once, its weights drawn from `seed` alone."""
        if self.model is not None:
            return
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            self.model = Decoder(self.backbone)
        self.model.activation_checkpointing = self.activation_checkpointing
        if self.compile_model:
            self.model.compile_layers()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW; the learning rate is set before each step."""
        return self.optimizer_config.build(self)

    def setup(self, stage: str) -> None:
        """Fit the run to its budget: a flag of the Trainer may shorten it, never lengthen it."""
        self._check_vocabulary()
        if str(self.trainer.precision) == "16-mixed":
            # Its gradients are scaled, and would be clipped as such.
            raise UserError("trainer.precision must be 32-true, bf16-mixed, bf16-true or 64-true, got 16-mixed")
        if stage == "fit" and (steps := self.planned_steps()) is not None:
            self._describe(steps)
            loop = self.trainer.fit_loop.epoch_loop
            if loop.max_steps > steps:
                raise UserError(
                    f"trainer.max_steps={loop.max_steps} is more than the {steps} steps of data.budget;"
                    " raise data.budget.tokens instead, max_steps can only shorten a run"
                )
            wanted = self._limited(steps)
            if wanted == 0 or loop.max_steps == 0:
                raise UserError(
                    f"no step is left to train with trainer.max_steps={loop.max_steps} and"
                    f" trainer.limit_train_batches={self.trainer.limit_train_batches}"
                )
            loop.max_steps = wanted if loop.max_steps == -1 else min(loop.max_steps, wanted)

    def _check_vocabulary(self) -> None:
        tokenizer = getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)
        if tokenizer is not None and tokenizer.vocab_size > self.backbone.vocab_size:
            raise UserError(
                f"model.backbone.vocab_size must be at least the tokenizer's {tokenizer.vocab_size},"
                f" got {self.backbone.vocab_size}"
            )

    def _limited(self, steps: int) -> int:
        """`limit_train_batches` ends the run there, where Lightning would only begin another epoch."""
        limit = self.trainer.limit_train_batches
        overfit = self.trainer.overfit_batches  # type: ignore[attr-defined] # which sets the other
        if overfit and int(overfit if isinstance(overfit, int) else overfit * steps) < 1:
            raise UserError(f"trainer.overfit_batches={overfit} is less than one of the {steps} steps of data.budget")
        if overfit:
            return steps
        return min(steps, limit if isinstance(limit, int) else round(limit * steps))

    def _describe(self, steps: int) -> None:
        """Say what the budget comes to, and warn if much of it is warm-up."""
        warm_up = self.optimizer_config.warmup_steps
        rank_zero_say(self.trainer.datamodule.plan.describe())  # type: ignore[attr-defined]
        rank_zero_say(f"warm-up: {warm_up:,} of {steps:,} steps ({warm_up / steps:.0%})")
        if warm_up > steps / 5:
            rank_zero_say(
                f"warning: more than a fifth of the run is warm-up: optimizer.warmup_steps={warm_up} of {steps} steps"
            )

    def planned_steps(self) -> int | None:
        """The optimizer steps that the data's budget states, if the data has one."""
        plan = getattr(getattr(self.trainer, "datamodule", None), "plan", None)
        return None if plan is None else plan.steps

    def total_steps(self) -> int:
        """The horizon of the learning rate: what the budget states, however early the run is stopped."""
        steps = self.planned_steps() or self.trainer.max_steps
        if steps is None or steps < 1:
            raise UserError(
                "the learning rate needs a horizon: train on a data module with a budget, or state trainer.max_steps"
            )
        return steps

    # Training ---------------------------------------------------------------------------------------------------------

    def forward(self, *arguments: Any, **options: Any) -> Tensor | LossSums:
        """The decoder's."""
        return cast(Tensor | LossSums, self.decoder(*arguments, **options))

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """One optimizer step over tokens and labels (A, M, T), and documents and positions if these stand alone."""
        stepping = stepping_for(self)
        tokens_AMT, labels_AMT = batch["tokens"], batch["labels"]
        scored = self.sum_over_ranks((labels_AMT != IGNORE).sum())
        weight = self.trainer.world_size / scored.clamp(min=1)
        learning_rate = self.optimizer_config.learning_rate_at(self.global_step, self.total_steps())
        for group in cast(LightningOptimizer, self.optimizers()).param_groups:
            group["lr"] = learning_rate

        nll = torch.zeros((), dtype=torch.float64, device=self.device)
        last = len(tokens_AMT) - 1
        for micro, (tokens_MT, labels_MT) in enumerate(zip(tokens_AMT, labels_AMT, strict=True)):
            index = index_of({name: part[micro] for name, part in batch.items()})
            sums = stepping.forward(tokens_MT, labels_MT, index=index, z_loss=self.z_loss)
            stepping.backward(sums.total * weight, last=micro == last)
            nll += sums.nll
        gradient_norm = stepping.clip(self.optimizer_config.clip_norm)
        if self._is_taken(batch, nll, scored, gradient_norm):
            stepping.take()
        else:
            stepping.pass_over()
        return {"step": Step(nll, scored, gradient_norm, learning_rate)}

    def _is_taken(self, batch: Batch, nll: Tensor, scored: Tensor, gradient_norm: Tensor) -> bool:
        if self.judge is None:
            return True
        nll_sum, norm_sum = self.sum_over_ranks(torch.stack((nll, gradient_norm.to(nll)))).tolist()
        return self.judge(batch, nll_sum / max(1, int(scored)), norm_sum / self.trainer.world_size)

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all ranks; every rank must call it."""
        total = self.trainer.strategy.reduce(value, reduce_op="sum")
        assert isinstance(total, Tensor)
        return total

    # Evaluation -------------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Begin to count anew."""
        self._start_scoring("validate")

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Score tokens against labels, both (M, C)."""
        self._score(batch, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        """Log loss, perplexity and bits per byte."""
        for loader in range(len(self.scores)):
            self._add_result("validate", loader)
        self._log_scores("validate")

    def on_test_epoch_start(self) -> None:
        """Begin to count anew."""
        self._start_scoring("test")
        if any(score.through_cache for score in self.scores):
            if getattr(self.trainer.strategy, "shards_weights", False):
                # ranks would ask each other for weights at different times
                raise UserError("data.eval_through_cache needs whole weights on each rank: -c hardware/ddp")
            as_in_generation(self.decoder)

    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Score tokens against labels, both (M, C); of a task, count what is answered as labelled."""
        self._score(batch, dataloader_idx)
        if batch_idx + 1 == self.trainer.num_test_batches[dataloader_idx]:
            self._add_result("test", dataloader_idx)

    def on_test_epoch_end(self) -> None:
        """Log loss, perplexity and bits per byte of each corpus and context, or the accuracy of each task."""
        self.decoder.expand()
        self._log_scores("test")

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """The negative log-likelihood in nats of each label, (M, C) float32; zero where nothing is scored."""
        return {**batch, "nll": nll_of(self.decoder, batch)}

    def _start_scoring(self, stage: str) -> None:
        loaders = self.trainer.num_val_batches if stage == "validate" else self.trainer.num_test_batches
        self.scores = [self._score_of(stage, loader).to(self.device) for loader in range(len(loaders))]
        self.results = []

    def _evaluation(self, stage: str, loader: int) -> Any:
        """What the data says of a loader; None if it says nothing."""
        evaluations = getattr(getattr(self.trainer, "datamodule", None), "evaluations", {}).get(stage, [])
        return evaluations[loader] if loader < len(evaluations) else None

    def _score_of(self, stage: str, loader: int) -> Perplexity | Accuracy:
        known = self._evaluation(stage, loader)
        if stage == "validate" or not hasattr(known, "task"):
            return Perplexity()
        return Accuracy(known.whole, known.through_cache)

    def _score(self, batch: Batch, dataloader_idx: int) -> None:
        self.scores[dataloader_idx].read(self.decoder, batch)

    def _add_result(self, stage: str, loader: int) -> None:
        """Sum up what a loader came to; every rank must call it."""
        known = self._evaluation(stage, loader)
        if found := self.scores[loader].result(known):
            self.results.append({**({} if known is None else known.stated()), **found})

    def _log_scores(self, stage: str) -> None:
        metrics = {}
        for result in self.results:
            label = "validation" if stage == "validate" else stage
            if "task" in result:
                label = f"{label}/{task_name(result)}@{result['context']}"
            elif "corpus" in result and not (stage == "validate" and len(self.scores) == 1):
                label = f"{label}/{result['corpus']}@{result['context']}"
            names = ("loss", "perplexity", "bits_per_byte", "accuracy")
            measured = {name: result[name] for name in names if name in result}
            metrics.update({f"{label}/{name}": value for name, value in measured.items()})
        # Unless told, Lightning logs an evaluation within training one step early.
        # Every rank holds the same sums by now: sync_dist only tells Lightning so.
        self.log_dict({**metrics, "step": float(self.global_step)}, add_dataloader_idx=False, sync_dist=True)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def load_weights(self, checkpoint: Path) -> None:
        """Take the weights of a checkpoint file, and nothing else of it.

        Raises:
            UserError: if they do not fit.
        """
        stored = read_checkpoint(checkpoint)
        self.configure_model()
        check_shapes(shapes_of(self.state_dict()), shapes_of(stored["state_dict"]), checkpoint)
        self.load_state_dict(stored["state_dict"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the format's version and the model's configuration, as plain values."""
        checkpoint["kvpath"] = {
            "format_version": FORMAT_VERSION,
            "written_by": __version__,
            "backbone": to_plain(self.backbone),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another format, or of a model of another shape.

        Raises:
            UserError: naming the version, or the tensors and their sizes.
        """
        check_format(checkpoint.get("kvpath", {}))
        if "state_dict" in checkpoint:  # else the strategy has checked and loaded the weights
            path = self._trainer.ckpt_path if self._trainer is not None else None
            check_shapes(shapes_of(self.state_dict()), shapes_of(checkpoint["state_dict"]), path or "the checkpoint")


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of each."""
    return {name: tuple(value.shape) for name, value in tensors.items()}


def check_shapes(
    ours: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]], checkpoint: str | Path
) -> None:
    """Refuse weights of a checkpoint that do not fit.

    Raises:
        UserError: naming it, and up to five tensors that are missing, not known, or of another size.
    """
    problems = [f"{name} is missing" for name in ours if name not in theirs]
    problems += [f"{name} is not in this model" for name in theirs if name not in ours]
    problems += [
        f"{name} is {shape} in the checkpoint, {ours[name]} in this model"
        for name, shape in theirs.items()
        if name in ours and shape != ours[name]
    ]
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise UserError(f"{checkpoint} is of another model: " + "; ".join(problems[:5]) + more)
