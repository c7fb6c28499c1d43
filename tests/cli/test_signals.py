"""A run that is told to stop finishes its step, saves once, exits with 75, and goes on as if nothing had been."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpath.cli import running
from kvpath.errors import UserError
from kvpath.training.module import LanguageModel
from kvpath.training.saving import Saving
from kvpath.training.signals import StopOnSignal
from kvpath.training.watch import Watch
from tests.cli.test_resume import assert_equal_runs, state
from tests.runs import kvpath, write_config, write_corpus
from tests.training.toys import Record, toy_data, toy_module, toy_trainer

CHECKOUT = Path(__file__).parent.parent.parent
STOPS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps, validation after every third."""
    return write_config(tmp_path_factory.mktemp("signals"), data__budget__tokens=12 * 64)


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert kvpath("fit", "-c", config, "--run", run) == 0
    return run


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """What a signal does here is the same before and after each test."""
    before = {number: signal.getsignal(number) for number in STOPS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The step of each `last.ckpt` that is written."""
    steps: list[int] = []
    save = Saving._save

    def count(self: Saving, trainer: Any, path: Path) -> None:
        save(self, trainer, path)
        if path == self.last:
            steps.append(trainer.global_step)

    monkeypatch.setattr(Saving, "_save", count)
    return steps


def sends_at(step: int, *numbers: signal.Signals) -> Callable[..., bool]:
    """Sends signals to this process when it is asked in a step, once."""
    left = list(numbers)

    def send(trainer: Any) -> bool:
        here = trainer.global_step == step and bool(left)
        while here and left:
            os.kill(os.getpid(), left.pop(0))
        return here

    return send


def during(
    monkeypatch: pytest.MonkeyPatch, kind: type, method: str, send: Callable[..., bool], after: bool = False
) -> None:
    """Let it be sent before, or after, a method of a callback or of the module runs."""
    run = getattr(kind, method)

    def told(self: Any, *arguments: Any, **options: Any) -> Any:
        trainer = self.trainer if kind is LanguageModel else arguments[0]
        if not after:
            send(trainer)
        result = run(self, *arguments, **options)
        if after:
            send(trainer)
        return result

    monkeypatch.setattr(kind, method, told)


@pytest.mark.parametrize("numbers", [(STOPS[0],), (STOPS[1],), (*STOPS, *STOPS)], ids=["TERM", "USR1", "four times"])
def test_in_a_step(
    config: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saves: list[int],
    numbers: tuple[signal.Signals, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        during(patch, Watch, "on_train_batch_end", sends_at(7, *numbers))
        assert kvpath("fit", "-c", config, "--run", run) == 75
    assert f"{numbers[-1].name}: saved and stopped at step 7" in capsys.readouterr().err
    assert (state(run)["global_step"], saves) == (7, [7])
    assert not (run / "summary.json").exists()
    assert kvpath("fit", "-c", config, "--run", run, "--ckpt_path", "last") == 0
    assert_equal_runs(run, whole)


def test_in_a_validation_which_is_neither_skipped_nor_doubled(
    config: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: list[int]
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        during(patch, LanguageModel, "validation_step", sends_at(6, signal.SIGTERM))
        assert kvpath("fit", "-c", config, "--run", run) == 75
    assert (state(run)["global_step"], saves) == (6, [6])
    assert kvpath("fit", "-c", config, "--run", run, "--ckpt_path", "last") == 0
    assert_equal_runs(run, whole)


@pytest.mark.parametrize("after", [False, True], ids=["before writing", "after writing"])
def test_in_a_save_which_is_not_done_again(
    config: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: list[int], after: bool
) -> None:
    run, flags = tmp_path / "run", ["--every.save", "4 steps"]
    with monkeypatch.context() as patch:
        during(patch, Saving, "_save", sends_at(8, *STOPS), after=after)
        assert kvpath("fit", "-c", config, "--run", run, *flags) == 75
    assert (state(run)["global_step"], saves) == (8, [4, 8])
    assert kvpath("fit", "-c", config, "--run", run, *flags, "--ckpt_path", "last") == 0
    assert_equal_runs(run, whole)


def test_another_signal_while_it_leaves_changes_nothing(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: list[int]
) -> None:
    def told_again(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    during(monkeypatch, Watch, "on_train_batch_end", sends_at(2, signal.SIGTERM))
    monkeypatch.setattr(Watch, "on_exception", told_again, raising=False)
    assert kvpath("fit", "-c", config, "--run", tmp_path / "run") == 75
    assert saves == [2]


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("rank", [0, 1])
def test_before_training_there_is_nothing_to_save(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    rank: int,
) -> None:
    run, prepare = tmp_path / "run", running.prepare_fit

    def told(argv: list[str]) -> list[str]:
        os.kill(os.getpid(), number)
        return prepare(argv)

    with monkeypatch.context() as patch:
        patch.setattr(running, "prepare_fit", told)
        patch.setenv("RANK", str(rank))
        assert kvpath("fit", "-c", config, "--run", run) == (0 if rank else 75)
    said = f"{number.name}: stopped where there was nothing to save\n"
    assert capfd.readouterr().err == ("" if rank else said)
    assert not run.exists()
    assert signal.getsignal(number) is signal.SIG_DFL
    assert kvpath("fit", "-c", config, "--run", run) == 0


@pytest.mark.parametrize("kind", [ImportError, None])
def test_a_stop_that_was_lost_before_training_counts(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception] | None
) -> None:
    """What raises at a signal may be caught by whoever is running, or made something else of."""
    run, prepare = tmp_path / "run", running.prepare_fit

    def told(argv: list[str]) -> list[str]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit:
            if kind is not None:
                raise kind("of a library that was about to be read") from None
        return prepare(argv)

    with monkeypatch.context() as patch:
        patch.setattr(running, "prepare_fit", told)
        assert kvpath("fit", "-c", config, "--run", run) == 75
    assert not (run / "checkpoints" / "last.ckpt").exists()
    assert kvpath("fit", "-c", config, "--run", run, "--ckpt_path", "last") == 0


def test_a_signal_while_modules_are_imported_ends_the_process_at_once(tmp_path: Path) -> None:
    codes = tmp_path / "codes"
    for number, code in ((signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)):
        program = f"import signal; signal.raise_signal({int(number)})"
        (tmp_path / "slow_to_import.py").write_text(program, encoding="utf-8")
        main = (
            "import signal, sys; from kvpath.cli import main\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "main.COMMANDS['fit'] = main.Command('', 'slow_to_import', 'fit'); sys.exit(main.main(['fit']))"
        )
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{CHECKOUT}", "KVPATH_EXIT_CODES": str(codes)}
        ended = subprocess.run([sys.executable, "-c", main], env=environment, capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (code, "")
        assert codes.read_text(encoding="utf-8").splitlines()[-1] == str(code)


def test_signals_that_the_user_names_are_left_alone_before_training(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, found = running.prepare_fit, list[object]()

    def look(argv: list[str]) -> list[str]:
        found.extend(signal.getsignal(number) for number in STOPS)
        return prepare(argv)

    monkeypatch.setattr(running, "prepare_fit", look)
    assert kvpath("fit", "-c", config, "--run", tmp_path / "run", "--stop_on", "[]") == 0
    assert found == [signal.SIG_DFL, signal.SIG_DFL]


def test_in_the_last_step_the_run_is_done(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    during(monkeypatch, Watch, "on_train_batch_end", sends_at(12, signal.SIGTERM))
    assert kvpath("fit", "-c", config, "--run", run) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["step"] == summary["planned_steps"] == 12
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_run_that_was_done_and_goes_on_does_not_look_done(
    config: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    during(monkeypatch, Watch, "on_train_batch_end", sends_at(13, signal.SIGTERM))
    more = ["--ckpt_path", "last", "--data.budget.tokens", str(20 * 64), "--allow", "[horizon]"]
    assert kvpath("fit", "-c", config, "--run", run, *more) == 75
    assert not (run / "summary.json").exists()


def test_other_signals_may_be_listed(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    during(monkeypatch, Watch, "on_train_batch_end", sends_at(2, signal.SIGUSR2))
    try:
        assert kvpath("fit", "-c", config, "--run", tmp_path / "run", "--stop_on", "[SIGUSR2]") == 75
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert kvpath("fit", "-c", config, "--run", tmp_path / "new", "--stop_on", "[SIGKILL, TERM]") == 2
    error = capsys.readouterr().err
    assert "stop_on must name signals that can be caught, such as SIGTERM and SIGUSR1, got SIGKILL; " in error
    assert "got TERM" in error


def test_a_plain_trainer_takes_it_beside_saving(tmp_path: Path) -> None:
    class Told(Record):
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            super().on_train_batch_end(trainer, *arguments)
            sends_at(2, signal.SIGUSR1)(trainer)

    record, saving, corpus = Told(), Saving(tmp_path / "run"), write_corpus(tmp_path)
    with pytest.raises(SystemExit) as ended:
        toy_trainer(record, saving, StopOnSignal(), enable_checkpointing=True).fit(toy_module(), toy_data(corpus))
    assert (ended.value.code, len(record.losses)) == (75, 2)
    assert saving.last.is_file()
    with pytest.raises(UserError, match="StopOnSignal needs Saving among the callbacks"):
        toy_trainer(StopOnSignal()).fit(toy_module(), toy_data(corpus))


# Real processes -------------------------------------------------------------------------------------------------------


def started(run: Path, *argv: str) -> "subprocess.Popen[str]":
    """The command as a process of its own, seen to have logged its second step."""
    command = [sys.executable, "-m", "kvpath", *argv]
    process = subprocess.Popen(
        command, cwd=CHECKOUT, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, stderr=subprocess.PIPE, text=True
    )
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < 2:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.02)
    return process


def rank_one(process: "subprocess.Popen[str]") -> int:
    """The process of the second rank, which the first has started."""
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if b"LOCAL_RANK=1" in Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError("there is no second rank")


TWO = ["--trainer.devices=2", "--trainer.strategy=ddp"]


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """A run that does not end by itself before it is stopped."""
    return write_config(tmp_path, data__budget__tokens=20_000 * 64, every__validate="1000000 steps")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_signal_at_one_rank_stops_both(long: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = started(run, "fit", "-c", str(long), "--run", str(run), *TWO)
    other = rank_one(process)
    for _ in range(2):
        os.kill(other, signal.SIGTERM)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 75
    assert "Traceback" not in error
    gone_by = time.monotonic() + 60
    while Path(f"/proc/{other}").exists():
        assert time.monotonic() < gone_by
        time.sleep(0.02)
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert state(run)["global_step"] == steps[-1] >= 2
    assert f"a signal to another rank: saved and stopped at step {steps[-1]:,}" in error


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("told", ["one", "all"])
def test_two_ranks_go_on_as_if_nothing_had_been(tmp_path: Path, told: str) -> None:
    config = write_config(tmp_path, data__budget__tokens=150 * 64, every__validate="25 steps")
    fit = ["fit", "-c", str(config), *TWO]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert started(whole, *fit, "--run", str(whole)).wait(timeout=120) == 0
    process = started(run, *fit, "--run", str(run))
    for pid in [rank_one(process), process.pid][: 1 if told == "one" else 2]:
        os.kill(pid, signal.SIGTERM)
    assert process.wait(timeout=120) == 75
    assert state(run)["global_step"] < 150
    assert started(run, *fit, "--run", str(run), "--ckpt_path=last").wait(timeout=120) == 0
    assert_equal_runs(run, whole)


def test_a_series_hands_it_to_its_stage_and_passes_75_on(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stage(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **_: Any) -> None:
            does = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); print(flush=True)"
            does += "; signal.pause()"
            super().__init__([sys.executable, "-c", does], stdout=subprocess.PIPE)
            assert self.stdout is not None
            self.stdout.readline()

        def wait(self, timeout: float | None = None) -> int:
            if self.returncode is None:
                os.kill(os.getpid(), signal.SIGTERM)  # to the series
            return super().wait(timeout)

    monkeypatch.setattr("kvpath.series.worker.subprocess.Popen", Stage)
    file, study = tmp_path / "series.yaml", tmp_path / "study"
    stages = [{"name": "only", "pieces": []}]
    file.write_text(json.dumps({"run": str(study), "pieces": [str(config)], "stages": stages}), encoding="utf-8")
    assert kvpath("series", "run", file) == 75
    assert f"{study / 'only'}: ended with exit code 75" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
