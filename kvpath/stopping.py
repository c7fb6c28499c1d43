"""A run that is told to stop before there is anything to save ends at once, as one that is to be run again."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvpath.errors import TO_BE_RUN_AGAIN
from kvpath.launch import is_first_rank

STOP_ON = ("SIGTERM", "SIGUSR1")
"""What schedulers send before they kill."""


@contextmanager
def stops_where_nothing_is_to_be_saved() -> Iterator[None]:
    """Until training listens itself, and after it: while a run is imported, its text prepared, its ranks looked for."""
    process, code = os.getpid(), TO_BE_RUN_AGAIN if is_first_rank() else 0
    told: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        told.append(number)
        if os.getpid() != process:  # forked since, and told by its parent
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif code and len(told) == 1:
            # whatever is being printed may be in the midst of it
            os.write(2, f"{signal.Signals(number).name}: stopped where there was nothing to save\n".encode())
        raise SystemExit(code)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.Signals[name] for name in STOP_ON)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is stop:  # else it is ignored by now
                signal.signal(number, handler)
