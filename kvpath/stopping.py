"""A run that is told to stop before there is anything to save ends at once, as one that is to be run again."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from kvpath.errors import TO_BE_RUN_AGAIN
from kvpath.launch import is_first_rank

STOP_ON = ("SIGTERM", "SIGUSR1")
"""What schedulers send before they kill."""

_told: list[str] = []


def told() -> str | None:
    """The signal that came outside of training, if one did; what raised at it may have been lost on its way."""
    return _told[0] if _told else None


def code_of_stop() -> int:
    """Of a process that was told to stop: a launcher kills the other ranks when one fails."""
    return TO_BE_RUN_AGAIN if is_first_rank() else 0


@contextmanager
def leaves_at_once(stop_on: tuple[str, ...], leave: Callable[[int], object]) -> Iterator[None]:
    """While modules are imported: what is raised in there comes out as anything, or not at all.

    Args:
        stop_on: The signals that mean a stop.
        leave: Called with the exit code, before the process ends without another word.
    """

    def end(number: int, _: FrameType | None) -> None:
        code = 130 if number == signal.SIGINT else code_of_stop()
        leave(code)
        os._exit(code)

    heeded = ("SIGINT",) if signal.getsignal(signal.SIGINT) is signal.default_int_handler else ()
    with _handled_by(end, (*stop_on, *heeded)):
        yield


@contextmanager
def stops_where_nothing_is_to_be_saved(stop_on: tuple[str, ...]) -> Iterator[None]:
    """Until training listens itself, and after it: while text is prepared, and ranks are looked for."""
    process = os.getpid()
    _told.clear()

    def stop(number: int, _: FrameType | None) -> None:
        if os.getpid() != process:  # forked since, and told by its parent
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        _told.append(signal.Signals(number).name)
        if len(_told) == 1 and is_first_rank():
            # whatever is being printed may be in the midst of it
            os.write(2, f"{_told[0]}: stopped where there was nothing to save\n".encode())
        raise SystemExit(code_of_stop())

    with _handled_by(stop, stop_on):
        yield


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None], names: tuple[str, ...]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # the only one that may
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.Signals[name] for name in names)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            if signal.getsignal(number) is handler:  # else it is ignored by now
                signal.signal(number, earlier)
