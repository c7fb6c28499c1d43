"""What the test of ranks runs, by itself on one rank or started as a script on two: it reports as JSON and weights."""

import json
import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from kvpath.cli.results_file import ResultsFile
from tests.training.toys import Record, Uneven, toy_data, toy_module, toy_trainer, weights


class Exchanges(Callback):
    """Counts how often ranks exchange gradients."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look over the shoulder of the wrapped model."""
        if (register := getattr(trainer.strategy.model, "register_comm_hook", None)) is not None:
            register(None, self._exchange)

    def _exchange(self, _: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.count += 1
        return allreduce_hook(torch.distributed.group.WORLD, bucket)


def run(corpus: Path, out: Path, ranks: int) -> None:
    """Three steps of four sequences, in micro-batches of one, then the held-out set, by overlapping windows, too."""
    checkpoint, found = out / f"{ranks}.ckpt", out / f"perplexity{ranks}.json"
    record, exchanges = Record(), Exchanges()
    strategy = "ddp" if ranks > 1 else "auto"
    file = ResultsFile(found, "toy", checkpoint)
    trainer = toy_trainer(record, exchanges, file, devices=ranks, strategy=strategy, precision="64-true")
    module, data = toy_module(), toy_data(corpus, micro_batch=1, kind=Uneven, eval_batch_tokens=48)
    trainer.fit(module, data)
    (fit_result,) = module.results
    trainer.save_checkpoint(checkpoint)
    trainer.test(module, data, verbose=False)
    held_out, to_score = module.results, [evaluation.n_tokens for evaluation in data.evaluations["test"]]
    sliding = toy_data(corpus, eval_batch_tokens=48, eval_contexts=[8, 16], eval_stride=5)
    trainer.test(module, sliding, verbose=False)
    whole = module.results
    if trainer.is_global_zero:  # as if it had been interrupted after the first
        file.done = file.done[:1]
        file._write_partial()
    trainer.test(module, sliding, verbose=False)
    if trainer.is_global_zero:
        torch.save(weights(module), out / f"weights{ranks}.pt")
        report = {
            "losses": record.losses,
            "gradient_norms": record.gradient_norms,
            "exchanges": exchanges.count,
            "micro_batches": data.plan.accumulation,
            "validation": fit_result,
            "test": held_out,
            "to_score": to_score,
            "sliding": whole,
            "gone_on": module.results,
        }
        (out / f"report{ranks}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), ranks=2)
