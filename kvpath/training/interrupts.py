"""Ctrl-C ends a run, wherever it falls."""

import os
import signal
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class Interrupts(Callback):
    """Raises `KeyboardInterrupt` before the next batch once there has been one; the second time, and before, at once.

    Python raises it wherever the main thread happens to be. Where that is waking a thread, as TensorBoard's writer, the
    thread may sleep for ever, and be waited for; in a destructor, in a callback of a weak reference or of the garbage
    collector Python only prints it; and there are calls in C that clear it.
    """

    def __init__(self) -> None:
        """Nothing has been received."""
        self.received = False
        self._batches = False
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
            self._before, self._batches = None, False

    def _note(self, number: int, frame: FrameType | None) -> None:
        at_once = self.received or not self._batches
        self.received = True
        if at_once:
            raise KeyboardInterrupt
        # whatever is being printed may be in the midst of it
        os.write(2, b"Ctrl-C: stops before the next batch; once more, at once\n")

    def _raise_if_received(self, *_: Any, **__: Any) -> None:
        self._batches = True
        if self.received:
            raise KeyboardInterrupt

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _raise_if_received
