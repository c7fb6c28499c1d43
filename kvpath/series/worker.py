"""Workers that run the jobs of a series, here and in any number of other processes at once."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kvpath.errors import TO_BE_RUN_AGAIN
from kvpath.series.clock import Clock
from kvpath.series.jobs import Job
from kvpath.series.search import finished
from kvpath.series.state import LOG, WORKER_LOCK, Progress, failed_at, forget_failure, note_failed
from kvpath.training.run_lock import LOCK, Held, let_go, take

PROGRAM = (sys.executable, "-m", "kvpath")
_INTERRUPTED = 130
_POLL_SECONDS = 0.2
_FREE = ("to do", "stopped", "failed")
_SET_PARENT_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # here: a new process must not load anything


class Workers:
    """Threads that each take the next free job and run it in a process of its own.

    A job is taken by the lock of a file in its run directory, which the kernel lets go of when its owner dies.
    """

    def __init__(self, progress: Progress, workers: int = 1, program: Sequence[str] = PROGRAM) -> None:
        """Nothing is started yet.

        Args:
            progress: what there is to do.
            workers: how many jobs run at once.
            program: what a job's arguments are given to.
        """
        self._progress = progress
        self._workers = workers
        self._program = list(program)
        self._began = time.time()
        self._mutex = threading.RLock()
        self._running: dict[Path, subprocess.Popen[bytes] | None] = {}
        """By run directory; None while its process is being started."""
        self._ended: set[Job] = set()
        """Not to be tried again by this process."""
        self._codes: list[int] = []
        self._stopped = 0
        """The exit code for having been told to stop; 0 if we were not."""
        self._clock = Clock(progress)
        self._errors: list[BaseException] = []

    def run(self, minutes: float | None = None) -> int:
        """Run all that can be run; gives the exit code.

        0 if the whole series is done, else that of the first job that failed, else 2 if a job's configuration has
        changed, else 75.

        Args:
            minutes: after so many, jobs are told to save and end, and no others are started.
        """
        self._say_what_is_done()
        deadline = None if minutes is None else time.monotonic() + minutes * 60
        shares = devices_of(self._workers)
        threads = [threading.Thread(target=self._work, args=(shares[i],), daemon=True) for i in range(self._workers)]
        with self._told():
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                time.sleep(_POLL_SECONDS / 4)
                if deadline is not None and time.monotonic() > deadline and not self._stopped:
                    _say(f"{minutes:g} minutes are over: jobs that run are told to save and end")
                    self.stop(signal.SIGTERM)
        if self._errors:
            raise self._errors[0]
        return self._exit_code()

    def stop(self, number: int, code: int = TO_BE_RUN_AGAIN) -> None:
        """Start nothing more, and hand a signal on to what runs."""
        # Without the mutex: a signal may come while this very thread holds it.
        self._stopped = self._stopped or code
        if number != signal.SIGINT:  # a terminal gives it to all of its processes
            for process in list(self._running.values()):
                if process is not None:
                    process.send_signal(number)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What a scheduler tells the series is the jobs' to hear: they save and end, and then the series does."""
        before = {
            number: signal.signal(number, lambda number, _: self.stop(number))
            for number in (signal.SIGTERM, signal.SIGUSR1)
        }
        before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, _: self.stop(number, _INTERRUPTED))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # One worker -------------------------------------------------------------------------------------------------------

    def _work(self, devices: str | None) -> None:
        try:
            while not self._stopped:
                with self._mutex:
                    taken = self._next()
                    waits = bool(self._running) or any(map(self._is_left_behind, self._progress.jobs))
                if taken is not None:
                    self._do(*taken, devices)
                elif waits:
                    time.sleep(_POLL_SECONDS)  # what runs now may be what the next job waits for
                else:
                    return
        except BaseException as error:  # raised again by the thread that waits
            self._errors.append(error)
            self.stop(signal.SIGTERM)

    def _next(self) -> tuple[Job, int] | None:
        """The first job that can be begun, and its lock."""
        for job in self._progress.jobs:
            if job in self._ended or job.directory in self._running or not self._is_free(job):
                continue
            job.directory.mkdir(parents=True, exist_ok=True)
            try:
                lock = take(job.directory / WORKER_LOCK)
            except Held:
                continue
            self._progress.ours.add(job.directory)
            # What was free a moment ago may have been done since.
            if self._progress.state(job).word not in _FREE:
                self._let_go(job, lock)
                continue
            self._running[job.directory] = None
            return job, lock
        return None

    def _let_go(self, job: Job, lock: int) -> None:
        let_go(job.directory / WORKER_LOCK, lock)
        self._progress.ours.remove(job.directory)

    def _is_left_behind(self, job: Job) -> bool:
        """Whether a run goes on whose worker is gone: it was told to end, too, and is saving."""
        owner = self._progress.owner
        return job.kind == "fit" and bool(owner(job, [LOCK])) and not owner(job, [WORKER_LOCK])

    def _is_free(self, job: Job) -> bool:
        state = self._progress.state(job)
        if state.word == "changed":
            _say(f"{job.name}: {changed_line(state.detail)}")
            self._ended.add(job)
            self._codes.append(2)
        if state.word == "failed" and (failed_at(job) or 0) > self._began:
            self._ended.add(job)  # by another process, while we work
            return False
        return state.word in _FREE

    def _do(self, job: Job, lock: int, devices: str | None) -> None:
        try:
            with self._mutex:
                command = self._progress.command(job)
                assert command is not None
                forget_failure(job)
                self._clock.begin(job)
            code, last_line = self._run(job, command, devices)
            with self._mutex:
                if code == 0 and job.kind == "test":
                    self._progress.note_tested(job)
                self._judge(job, code, last_line)
        finally:
            with self._mutex:
                self._ended.add(job)
                self._let_go(job, lock)
                del self._running[job.directory]

    def _judge(self, job: Job, code: int, last_line: str) -> None:
        stopped = bool(self._stopped) or code in (TO_BE_RUN_AGAIN, _INTERRUPTED)
        if code == 0 and job.kind == "fit" and not finished(job.directory):
            _say(f"{job.directory}: ended before the last step of its budget; the same command goes on")
            self._codes.append(TO_BE_RUN_AGAIN)
        elif code == 0:
            self._clock.end(job)
        else:
            _say(f"{job.name}: ended with exit code {code}{': ' * bool(last_line)}{last_line}")
            if not stopped:
                note_failed(job, code, last_line)
            if job.candidate is None or self._progress.state(job).word != "diverged":
                self._codes.append(code if not self._stopped else self._stopped)

    def _run(self, job: Job, command: list[str], devices: str | None) -> tuple[int, str]:
        """The exit code of a process of its own, and the last line it wrote; in a series without axes it has our
        terminal."""
        if not job.cell:
            process = subprocess.Popen([*self._program, *command], preexec_fn=_end_with_parent)
            return self._wait(job, process), ""
        with (job.directory / LOG).open("ab") as log:
            start = log.tell()
            environment = {**os.environ, **({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices})}
            process = subprocess.Popen(
                [*self._program, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=_end_with_parent,
            )
            code = self._wait(job, process)
        with (job.directory / LOG).open("rb") as written:
            return code, _last_line(written, start)

    def _wait(self, job: Job, process: "subprocess.Popen[bytes]") -> int:
        self._running[job.directory] = process
        if self._stopped and self._stopped != _INTERRUPTED:  # told while it was being started
            process.terminate()
        with process:
            code = process.wait()
        return code if code >= 0 else 128 - code  # as shells have it, for a process that a signal ended

    # What is said -----------------------------------------------------------------------------------------------------

    def _say_what_is_done(self) -> None:
        done = [job for job in self._progress.jobs if self._progress.state(job).word == "done"]
        for job in done:
            if job.kind == "fit" and not job.cell:
                _say(f"{job.directory}: done")
        if done and self._progress.jobs[0].cell:
            _say(f"{len(done)} of {len(self._progress.jobs)} runs and tests are done already")

    def _exit_code(self) -> int:
        states = {job: self._progress.state(job) for job in self._progress.jobs}
        if all(state.word in ("done", "diverged") for state in states.values()):
            return 0
        running = [f"{job.name} by {state.detail}" for job, state in states.items() if state.word == "running"]
        if running:
            _say(f"others are at work: {', '.join(running)}")
        failed = [code for code in self._codes if code != TO_BE_RUN_AGAIN]
        return self._stopped or next(iter(failed), TO_BE_RUN_AGAIN)


def changed_line(detail: str) -> str:
    """What is said of a run whose configuration is another one now."""
    return (
        f"{detail}: it was not trained with this file, and is left as it is;"
        " move its directory away to train it anew, or take the change back"
    )


def devices_of(workers: int) -> list[str | None]:
    """The GPUs of each worker, as CUDA_VISIBLE_DEVICES has them: equal shares, or None for all where they are few."""
    if workers == 1:
        return [None]
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    each = len(devices) // workers
    if each == 0:
        return [None] * workers
    return [",".join(devices[i * each : (i + 1) * each]) for i in range(workers)]


def _last_line(file: IO[bytes], start: int) -> str:
    """The last line with something in it, of what was written from `start` on."""
    file.seek(max(start, file.seek(0, os.SEEK_END) - 20_000))
    lines = [line.strip() for line in file.read().decode("utf-8", "replace").replace("\r", "\n").splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing")


def _end_with_parent() -> None:
    """In a new process: SIGTERM when the thread that waits for it is killed, so that no run goes on by itself."""
    if _LIBC is not None:
        _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
