"""fit, validate, test and predict: LightningCLI with one directory a run and no surprises."""

import time
from collections.abc import Iterable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from kvpath.analysis.matching import resolve_widths
from kvpath.cli.parsing import PlainErrorParser, allow_choice_by_class
from kvpath.cli.results import PredictionFile, recall_table, results_table
from kvpath.cli.results_file import ResultsFile
from kvpath.cli.resume import (
    changes,
    refuse_changes,
    refuse_other_holdout,
    refuse_trained_texts,
    say_conflicts,
    trained_on,
)
from kvpath.cli.run_options import Every, Sample
from kvpath.cli.stages import tokens_seen
from kvpath.config import backbone_from
from kvpath.data.datamodule import PackedText
from kvpath.errors import UserError
from kvpath.interop.exported import is_export
from kvpath.launch import Launch
from kvpath.stopping import STOP_ON
from kvpath.training.cadence import Cadence
from kvpath.training.csv_curves import keep_rows
from kvpath.training.curves import Curves, write_hyper_parameters
from kvpath.training.deepspeed.directory import is_sharded
from kvpath.training.final_validation import FinalValidation
from kvpath.training.interrupts import Interrupts
from kvpath.training.launched import environment_of
from kvpath.training.meeting import DDP
from kvpath.training.metrics_file import MetricsFile, final_metrics
from kvpath.training.module import LanguageModel
from kvpath.training.opening import Opening
from kvpath.training.run_directory import RunDirectory, find_checkpoint, run_of
from kvpath.training.same_tokenizer import SameTokenizer, tokenizer_of
from kvpath.training.sample import TextSample
from kvpath.training.saving import Saving
from kvpath.training.say import rank_zero_say
from kvpath.training.signals import StopOnSignal
from kvpath.training.spikes import Action, SpikeRule, Spikes
from kvpath.training.stored_config import FORMAT_VERSION, read_checkpoint, stored_step, to_plain
from kvpath.training.validation_clock import ValidationClock
from kvpath.training.watch import Progress, Watch

NOT_STORED = ("config", "run", "ckpt_path", "init_from", "allow", "output", "weights_only", "verbose")
"""Keys that say what to do now, and not what a run is."""

SHORTENS: dict[str, Any] = {"max_steps": -1, "max_time": None, "limit_train_batches": None}
"""Keys of the Trainer that only end an attempt early, and what they are for a run."""

_DEFAULTS: dict[str, Any] = {
    "max_epochs": -1,
    "check_val_every_n_epoch": None,
    "log_every_n_steps": 1,
    "use_distributed_sampler": False,
    "enable_model_summary": False,
}

_SETTLED_ELSEWHERE = {
    "accumulate_grad_batches": (1, "it follows from data.budget and the number of devices"),
    "gradient_clip_val": (None, "state model.optimizer.clip_norm"),
    "val_check_interval": (None, "state every.validate, in steps, tokens or minutes"),
    "check_val_every_n_epoch": (None, "state every.validate, in steps, tokens or minutes"),
    "log_every_n_steps": (1, "state every.log, in steps, tokens or minutes"),
    "max_epochs": (-1, "state data.budget.tokens; a run is one pass of that length"),
    "gradient_clip_algorithm": (None, "gradients are clipped by their norm: state model.optimizer.clip_norm"),
    "enable_checkpointing": (True, "a run always keeps its last state: state every.save"),
    "default_root_dir": (None, "state run"),
    "barebones": (False, "it leaves out what a run is watched by"),
}


class KVPathCLI(LightningCLI):
    """One subcommand of the four, on a parsed command line."""

    command = "fit"

    def __init__(self, args: list[str]) -> None:
        """Parse and run.

        Raises:
            UserError: for whatever the user can mend.
        """
        allow_choice_by_class()
        super().__init__(
            LanguageModel,
            PackedText,
            save_config_callback=None,
            trainer_defaults=_DEFAULTS,
            seed_everything_default=0,
            parser_class=PlainErrorParser,
            args=args,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Only the one that was asked for: each parser takes time to build."""
        return {self.command: LightningCLI.subcommands()[self.command]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Our own arguments, the same for all four, so that a saved config loads in each."""
        parser.add_argument("--run", type=str | None, help="Directory of the run.")
        parser.add_argument("--name", type=str | None, help="Name of the run in tables; the directory's by default.")
        parser.add_argument("--init_from", type=str | None, help="Start from the weights of this run or checkpoint.")
        parser.add_argument(
            "--allow", type=list[str], default=[], help="What a resume may change: model, data, horizon."
        )
        parser.add_argument("--output", type=str | None, help="Where results go; the run directory by default.")
        parser.add_argument("--peak_flops", type=float | None, help="FLOPs/s of a device, for MFU; measured if null.")
        parser.add_argument(
            "--stop_on",
            type=list[str],
            default=list(STOP_ON),
            help="Signals at which to save and exit with 75.",
        )
        parser.add_argument(
            "--on_nan",
            type=Action,
            default="stop",
            help="If loss or gradient is not finite: stop, skip the step, or go back to the last checkpoint.",
        )
        parser.add_class_arguments(SpikeRule, "on_spike")
        parser.add_class_arguments(Every, "every")
        parser.add_class_arguments(Sample, "sample")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse what was given, and never `sys.argv`."""
        self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """What a checkpoint stores never beats the command line: it is read before parsing instead."""

    def before_instantiate_classes(self) -> None:
        """Refuse Trainer flags whose place is elsewhere."""
        trainer = self._get(self.config, "trainer")
        UserError.raise_all(
            f"trainer.{name}={trainer[name]} cannot be set here: {instead}"
            for name, (neutral, instead) in _SETTLED_ELSEWHERE.items()
            if trainer.get(name) not in (None, neutral)
        )
        if self.own.peak_flops is not None and not self.own.peak_flops > 0:
            raise UserError(f"peak_flops must be positive, got {self.own.peak_flops}")
        Sample(**vars(self.own.sample))
        self._settle_widths()
        self._settle_start()
        self._settle_logger()
        self._check_strategy()
        self.every: Every = Every(**vars(self._get(self.config, "every")))
        self.cadences = {
            name: Cadence.parse(getattr(self.every, name), f"every.{name}") for name in ("log", "validate", "save")
        }

    def _settle_widths(self) -> None:
        """Solve `d_ff: match`, so that the stored configuration holds integers."""
        backbone = self.own.model.backbone
        if backbone.d_ff == "match":
            backbone.d_ff = resolve_widths(backbone_from(backbone.as_dict())).d_ff

    def _settle_start(self) -> None:
        """A stage goes on in the data where the run it takes its weights from ended, unless told otherwise."""
        own = self.own
        if own.init_from and own.data.start_tokens is None:
            own.data.start_tokens = tokens_seen(own.init_from, own.data.as_dict())

    def _check_strategy(self) -> None:
        """Here, since the parser would say no more of an error in a strategy than that it does not fit."""
        strategy = self.own.trainer.strategy
        if str(strategy).startswith("deepspeed"):
            raise UserError(
                f"trainer.strategy={strategy} would not divide the loss as one process does: -c hardware/zero2"
            )
        if str(getattr(strategy, "class_path", "")).endswith("meeting.DDP"):
            DDP(**strategy.init_args)
        if str(getattr(strategy, "class_path", "")).endswith(".ZeRO"):
            from kvpath.training.deepspeed.mistakes import FIELDS, check_fields

            check_fields(**{name: strategy.init_args[name] for name in FIELDS})
            self._check_installed()

    def _check_installed(self) -> None:
        from kvpath.training.deepspeed.mistakes import check_installed

        check_installed()

    def _settle_logger(self) -> None:
        """A logger's `{run}` stands for the run directory."""
        loggers = self.own.trainer.logger
        for logger in loggers if isinstance(loggers, list) else [loggers]:
            arguments = getattr(logger, "init_args", None)
            if str(getattr(logger, "class_path", "")).endswith("WandbLogger") and find_spec("wandb") is None:
                raise UserError("trainer.logger WandbLogger: wandb is not installed: pip install wandb")
            if arguments is None:
                continue
            for key, value in arguments.as_dict().items():
                if isinstance(value, str) and "{run}" in value:
                    arguments[key] = value.replace("{run}", self.own.run or ".")

    @property
    def own(self) -> Any:
        """The parsed values of this subcommand."""
        return self.config[self.command]

    def stored(self) -> str:
        """The complete configuration as YAML, without what only says what to do now."""
        values = self.own.clone()
        for key in NOT_STORED:
            values.pop(key, None)
        for key, neutral in SHORTENS.items():
            values.trainer[key] = neutral
        return self._parser(self.command).dump(values, skip_unset=False, skip_validation=True)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer, with the loggers and callbacks of a run."""
        config = self._get(self.config_init, "trainer")
        self.run_directory = RunDirectory(self.own.run) if self.own.run else None
        kwargs["default_root_dir"] = str(self.run_directory.path) if self.run_directory else None
        kwargs["logger"] = list(self._loggers(config.get("logger")))
        callbacks = list(self._callbacks())
        if self.command == "fit":
            kwargs["val_check_interval"] = self._validation_interval()
        else:
            kwargs["enable_checkpointing"] = False
        if (launch := Launch.from_environment()) is not None:
            # Here, so that what is stored does not depend on the machines.
            devices, machines = launch.settle(config.get("devices", "auto"), config.get("num_nodes", 1))
            kwargs |= {"devices": devices, "num_nodes": machines}
            kwargs["plugins"] = [*(config.get("plugins") or []), environment_of(launch)]
        try:
            return self._instantiate_trainer({**config, **kwargs}, callbacks)
        except (MisconfigurationException, TypeError, ValueError) as error:  # a flag that Lightning does not take
            raise UserError(f"trainer: {' '.join(str(error).split())}") from error

    def _validation_interval(self) -> int | timedelta:
        cadence, budget = self.cadences["validate"], self.datamodule.budget
        tokens = budget.global_batch_tokens or (budget.global_batch_sequences or 1) * self.datamodule.seq_len
        return cadence.in_steps(int(tokens)) or timedelta(minutes=cadence.amount)

    def _loggers(self, configured: Any) -> Iterable[Logger]:
        if self.run_directory is None or self._get(self.config_init, "trainer").get("fast_dev_run"):
            return
        if configured is None or configured is True:
            if self.command == "fit":
                yield Curves(self.run_directory.path)
        elif configured is not False:
            yield from configured if isinstance(configured, list) else [configured]
        if self.command == "fit":
            yield MetricsFile(self.run_directory.metrics)

    def _callbacks(self) -> Iterable[Callback]:
        if self._get(self.config_init, "trainer").get("enable_progress_bar") is not False:
            yield Progress()
        if self.command == "predict":
            yield PredictionFile(self._output("predictions.jsonl"))
        if self.command == "test":
            name = self.own.name or (self.run_directory.path.name if self.run_directory else "model")
            self.found = ResultsFile(
                self._output("retrieval.json" if self.datamodule.asks else "perplexity.json"),
                name,
                Path(self.own.ckpt_path),
            )
            yield self.found
        yield Interrupts()
        if self.command != "fit":
            return
        assert self.run_directory is not None
        if self.own.init_from and not self.own.ckpt_path and "data" not in self.own.allow:
            yield SameTokenizer(self.own.init_from, find_checkpoint(self.own.init_from, "init_from"))
        yield Opening(self.run_directory, self.stored(), self.own.ckpt_path)
        yield Watch(self.every.log, self.own.peak_flops)
        yield TextSample(**vars(self.own.sample), path=self.run_directory.samples)
        yield ValidationClock(self.cadences["validate"])
        yield FinalValidation()
        yield Spikes(self.run_directory.path, self.own.on_nan, SpikeRule(**vars(self.own.on_spike)))
        yield Saving(self.run_directory.checkpoints, self.every.save)
        yield StopOnSignal(self.own.stop_on)

    def _output(self, name: str) -> Path:
        if self.own.output:
            return Path(self.own.output)
        return (self.run_directory.path if self.run_directory else Path.cwd()) / name

    # fit --------------------------------------------------------------------------------------------------------------

    def before_fit(self) -> None:
        """Refuse what must not change, and take the weights of another run."""
        run = self.run_directory
        assert run is not None
        if self.own.ckpt_path:
            before = run_of(Path(self.own.ckpt_path)) or run
            if before.config.exists():
                defaults = self._parser(self.command).get_defaults().as_dict()
                changed = changes(before.config.read_text(encoding="utf-8"), self.stored(), defaults)
                refuse_changes(changed, self.own.allow)
            self.datamodule.accepts_other_text = "data" in self.own.allow
        if self.own.init_from and not self.own.ckpt_path:
            self.model.load_weights(find_checkpoint(self.own.init_from, "init_from"))
            rank_zero_say(f"weights from {self.own.init_from}")
        if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_only(keep_rows)(self.trainer.loggers)
        self.started = time.monotonic()

    def after_fit(self) -> None:
        """Write the summary, and the hyper-parameters with the final metrics."""
        if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._summarise(self.datamodule.stream_hash())  # which all ranks must ask for

    @rank_zero_only
    def _summarise(self, stream_hash: str | None) -> None:
        run = self.run_directory
        assert run is not None
        metrics = final_metrics(run.metrics)
        plan = self.datamodule.plan
        step = self.trainer.global_step
        values = {key: value for key, value in self.own.clone().as_dict().items() if key not in NOT_STORED}
        hyper_parameters = {key: value for key, value in flatten(values).items() if value is not None}
        for logger in self.trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                write_hyper_parameters(logger, hyper_parameters, metrics)
            elif not isinstance(logger, MetricsFile):
                logger.log_hyperparams(hyper_parameters)
        run.finish(
            {
                "format_version": FORMAT_VERSION,
                "name": self.own.name or run.path.name,
                "step": step,
                "planned_steps": plan.steps,
                "tokens": step * plan.tokens_per_step,
                "stream_hash": stream_hash,
                "parameters": sum(getattr(part, "ds_numel", part.numel()) for part in self.model.decoder.parameters()),
                "seconds_of_this_attempt": round(time.monotonic() - self.started, 1),
                "metrics": metrics,
                "checkpoint": str(run.last.relative_to(run.path)),
            }
        )
        rank_zero_say(f"run: {run.path} · checkpoint: {run.last} · curves: tensorboard --logdir {run.path.parent}")

    # The others -------------------------------------------------------------------------------------------------------

    def before_validate(self) -> None:
        """Say where the command line and the checkpoint differ."""
        checkpoint = Path(self.own.ckpt_path)
        say_conflicts(read_checkpoint(checkpoint)["kvpath"]["backbone"], to_plain(self.model.backbone))
        data = self.own.data.as_dict()
        if self.command != "validate" and data.get("evaluate"):
            refuse_trained_texts(trained_on(checkpoint), data["evaluate"], self.datamodule.evaluate)
        else:
            refuse_other_holdout(trained_on(checkpoint), data, "validation" if self.command == "validate" else "test")
        self.datamodule.tokenizer_of_weights = tokenizer_of(checkpoint)
        self._say_what_to_mind(checkpoint)
        if is_export(checkpoint) or is_sharded(checkpoint) or hasattr(self.trainer.strategy, "sharding"):
            # Lightning reads a file alone, and DeepSpeed no other than its own.
            self.model.load_weights(checkpoint)
            self.config_init[self.command].ckpt_path = None

    before_test = before_predict = before_validate

    def _say_what_to_mind(self, checkpoint: Path) -> None:
        """What is no mistake, and yet may not be meant."""
        run, longest = run_of(checkpoint), self.model.backbone.max_seq_len
        if run is not None and not run.summary.exists():
            rank_zero_say(
                f"warning: {run.path} is unfinished: these are its weights of step {stored_step(checkpoint):,}"
            )
        longer = [f"{context:,}" for context in self.datamodule.eval_contexts if context > longest]
        if longer and self.command != "validate":
            rank_zero_say(
                f"warning: data.eval_contexts {', '.join(longer)}: longer than the max_seq_len={longest:,} that the"
                " model is trained for"
            )

    @rank_zero_only
    def after_validate(self) -> None:
        """Print what was found."""
        print(results_table(self.model.results))

    @rank_zero_only
    def after_test(self) -> None:
        """Print what was found, before an interruption, too."""
        table = recall_table if self.datamodule.asks else results_table
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            print(table(self.model.results))
            return
        print(table(self.found.entries()))
        rank_zero_say(f"results: {self.found.path}")


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as dotted ones."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
