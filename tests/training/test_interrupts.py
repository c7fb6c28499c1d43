import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from kvpath.errors import by_interrupt
from kvpath.training.interrupts import Interrupts
from tests.training.toys import Record, toy_data, toy_module, toy_trainer


class _Interrupted:
    """Gets Ctrl-C where Python does not let the exception out."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


class Interrupt(Callback):
    """Ctrl-C in the first step."""

    def __init__(self, times: int = 1, in_a_destructor: bool = False) -> None:
        self.times, self.in_a_destructor = times, in_a_destructor

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 1 and self.in_a_destructor:
            lost = _Interrupted()
            del lost
        elif trainer.global_step == 1:
            for _time in range(self.times):
                signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Heeded, as it is not where a shell started the tests in the background; as it was afterwards."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("python_loses_it", [True, False])
def test_an_interrupt_that_python_would_lose_ends_the_run_at_the_next_batch(
    corpus: Path, python_loses_it: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    record = Record()
    with pytest.raises(SystemExit) as ended:
        toy_trainer(record, Interrupt(in_a_destructor=python_loses_it), Interrupts()).fit(
            toy_module(), toy_data(corpus)
        )
    assert len(record.losses) == 1
    assert by_interrupt(ended.value)
    assert "Ctrl-C: stops before the next batch; once more, at once" in capfd.readouterr().err


def test_a_second_one_ends_the_run_at_once(corpus: Path) -> None:
    record = Record()
    with pytest.raises(SystemExit) as ended:
        toy_trainer(Interrupt(times=2), record, Interrupts()).fit(toy_module(), toy_data(corpus))
    assert not record.losses
    assert by_interrupt(ended.value)


def test_a_run_that_ends_leaves_pythons_own_handler(corpus: Path) -> None:
    toy_trainer(Interrupts()).fit(toy_module(), toy_data(corpus))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_an_interrupt_led_to_is_known_by_it() -> None:
    def unfinished() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("a file that is left unfinished")

    with pytest.raises(RuntimeError) as led_to:
        unfinished()
    assert by_interrupt(led_to.value)
    assert by_interrupt(KeyboardInterrupt())
    assert not by_interrupt(RuntimeError())
