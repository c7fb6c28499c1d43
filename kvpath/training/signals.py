"""A run that is told to stop saves once and can be run again."""

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from kvpath.errors import TO_BE_RUN_AGAIN, UserError
from kvpath.stopping import STOP_ON, told
from kvpath.training.saving import Saving, saving_of
from kvpath.training.say import rank_zero_say


class StopOnSignal(Callback):
    """A signal sets a flag, and nothing else. Ranks agree on it between two steps, after the validation of the first.

    Then all save together and the process exits with 75; ranks after the first with 0, since a launcher kills the
    others when one fails. Needs `Saving` beside it. Lightning's own handling, which exchanges tensors and kills
    processes inside of the handler, is put out of action.
    """

    def __init__(self, signals: Sequence[str] = STOP_ON) -> None:
        """Which signals.

        Args:
            signals: Names such as SIGTERM; none leaves all signals as they are.

        Raises:
            UserError: naming what is no signal, or none that can be caught.
        """
        UserError.raise_all(
            f"stop_on must name signals that can be caught, such as {' and '.join(STOP_ON)}, got {name}"
            for name in signals
            if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP")
        )
        self.signals = [signal.Signals[name] for name in signals]
        self.received: str | None = None
        """The name of the signal that this rank got."""
        self._before: dict[signal.Signals, Any] = {}
        self._saving: Saving

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen from now on."""
        self._saving = saving_of(trainer, "StopOnSignal")
        self.received = told()
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        if threading.current_thread() is threading.main_thread():  # the only one that may
            self._before = {number: signal.signal(number, self._note) for number in self.signals}

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Stop here if any rank was told to; a save that is due comes first, and what arrives during it counts."""
        self._saving.save_if_due(trainer)
        if not trainer.strategy.reduce_boolean_decision(self.received is not None, all=False):
            return
        self._saving.save_last(trainer)
        why = self.received or "a signal to another rank"
        rank_zero_say(f"{why}: saved and stopped at step {trainer.global_step:,}")
        # A second one must not kill what is only leaving.
        self._listen(dict.fromkeys(self._before, signal.SIG_IGN))
        raise SystemExit(TO_BE_RUN_AGAIN if trainer.is_global_zero else 0)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The handlers that were there before."""
        self._listen(self._before)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The handlers that were there before, unless it is this that ends the run."""
        if not isinstance(exception, SystemExit):
            self._listen(self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name

    def _listen(self, handlers: dict[signal.Signals, Any]) -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        self._before = {}
