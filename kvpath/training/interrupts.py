"""Ctrl-C ends a run, also where Python loses the exception that it raises."""

import signal
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class Interrupts(Callback):
    """Raises `KeyboardInterrupt` again at the next batch if the run has gone on after one.

    It is raised wherever the main thread happens to be. In a destructor, in a callback of a weak reference or of the
    garbage collector Python only prints it, and there are calls in C that clear it.
    """

    def __init__(self) -> None:
        """Nothing has been received."""
        self.received = False
        self._before: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take Python's own handler's place, if it is that one."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._note)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Python's own again."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        raise KeyboardInterrupt

    def _raise_again(self, *_: Any, **__: Any) -> None:
        if self.received:
            raise KeyboardInterrupt

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _raise_again
