"""The ranks of a run meet at its start, in bounded time."""

import atexit
import os
import socket
import subprocess
import time
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from kvpath.errors import UserError
from kvpath.stopping import told

PATIENCE = timedelta(minutes=10)
"""How long ranks wait at the start for all to be there."""


LETTING_GO = 0.2
"""Seconds at the end of a process in which threads of torch let go of what they have exchanged."""

MARGIN = 5.0
"""Seconds that torch may take longer than it is told."""


class NotMet(UserError):
    """Ranks that did not find each other. The first of each machine says so, since rank 0 may not be there to."""

    on_every_machine = True

    def __init__(self, what: str) -> None:
        address, port = os.environ.get("MASTER_ADDR", "unknown"), os.environ.get("MASTER_PORT", "unknown")
        super().__init__(
            f"the ranks did not meet at MASTER_ADDR:MASTER_PORT = {address}:{port} ({what}): see that rank 0 runs"
            " there, that no other process has this port, that no firewall closes it, and that all ranks were started"
        )


def not_met(error: RuntimeError) -> NotMet | None:
    """What to tell the user of an error while ranks are still looking for each other; None at any other time."""
    if torch.distributed.is_initialized() or not isinstance(error, DistNetworkError | DistStoreError):
        return None
    return NotMet(str(error).partition("\n")[0])


class MeetsInTime(DDPStrategy):
    """What is added to a strategy of several processes: they meet within `PATIENCE`, or within its timeout."""

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            atexit.register(_stop_started, self._launcher)

    def setup_distributed(self) -> None:
        """Meet; what Lightning or DeepSpeed does next finds the ranks together.

        Raises:
            NotMet: not all of them came.
        """
        self.set_world_ranks()
        if not torch.distributed.is_initialized():
            self._meet()
        atexit.register(leave_the_others)
        super().setup_distributed()

    def _meet(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        assert self._timeout is not None
        address, port = environment.main_address, environment.main_port
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
        rank, ranks = environment.global_rank(), environment.world_size()
        patience = min(self._timeout, PATIENCE)
        if rank != 0:
            _wait_for(address, port, patience)
        store = _store(rank, ranks, patience)
        store.set_timeout(self._timeout)
        torch.distributed.init_process_group(
            self._get_process_group_backend(),
            store=PrefixStore("kvpath", store),
            rank=rank,
            world_size=ranks,
            timeout=self._timeout,
            device_id=self.root_device if self.root_device.type != "cpu" else None,
        )


def _wait_for(address: str, port: int, patience: timedelta) -> None:
    """Until the port takes connections; torch would wait as well, and print where in its source it does."""
    until = time.monotonic() + patience.total_seconds()
    while True:
        try:
            socket.create_connection((address, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise NotMet(f"{error} for {patience.total_seconds():g} s") from error
        time.sleep(0.2)


def _store(rank: int, ranks: int, patience: timedelta) -> Store:
    """What the ranks exchange addresses by.

    It is looked for in a thread: torch waits without end for whoever takes its connection and does not answer.
    """
    found: SimpleQueue[Store | Exception] = SimpleQueue()

    def look() -> None:
        try:
            found.put(next(rendezvous("env://", rank, ranks, timeout=patience))[0])
        except Exception as error:  # raised again below
            found.put(error)

    Thread(target=look, daemon=True).start()
    try:
        store = found.get(timeout=patience.total_seconds() + MARGIN)
    except Empty:
        raise NotMet(f"what has the port does not answer for {patience.total_seconds():g} s") from None
    if isinstance(store, Exception):
        raise store
    return store


class DDP(MeetsInTime):
    """The whole model on each device; gradients are averaged."""

    def __init__(self, timeout_minutes: float = 30.0) -> None:
        """How long to wait.

        Args:
            timeout_minutes: How long a rank waits for the others before it gives up.

        Raises:
            UserError: naming the field and the value.
        """
        if not timeout_minutes > 0:
            raise UserError(f"trainer.strategy DDP: timeout_minutes must be positive, got {timeout_minutes}")
        super().__init__(timeout=timedelta(minutes=timeout_minutes), gradient_as_bucket_view=True)


def _stop_started(launcher: _SubprocessScriptLauncher) -> None:
    """If this process was told to stop, the ranks that it has started were not."""
    if told() is None:
        return
    for rank in launcher.procs:
        rank.terminate()
    for rank in launcher.procs:
        try:
            rank.wait(MARGIN)
        except subprocess.TimeoutExpired:
            rank.kill()


def leave_the_others() -> None:
    """A process that ends with its connections open may wait for their threads.

    Where somebody holds on to a group, as DeepSpeed does, its threads go on, and one that lets go of a tensor while
    Python is being taken down ends the process with SIGABRT: give them the time before.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        time.sleep(LETTING_GO)
