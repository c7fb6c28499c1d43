"""The progress bar."""

from types import SimpleNamespace
from typing import cast

from lightning.pytorch import Trainer

from kvpath.training.watch import Progress


def test_a_resumed_run_is_shown_whole_and_at_its_own_rate() -> None:
    progress = Progress()
    trainer = SimpleNamespace(
        max_steps=146, global_step=60, current_epoch=0, max_epochs=-1, num_training_batches=146, callbacks=[]
    )
    progress._trainer = cast(Trainer, trainer)
    progress.train_progress_bar = progress.init_train_tqdm()
    progress.on_train_epoch_start(cast(Trainer, trainer))
    bar = progress.train_progress_bar
    assert (bar.n, bar.initial, bar.total) == (60, 60, 146)
    bar.close()
