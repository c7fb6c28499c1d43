"""Ranks of a run as processes of their own, on machines that are all this one."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CHECKOUT = Path(__file__).parent.parent
LAUNCHERS = CHECKOUT / "scripts" / "launch"

WITHIN = 60.0
"""Seconds in which a rank that has lost another must have ended, as docs/clusters.md says."""


def free_port() -> int:
    """A port that no one listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment(**more: str | int) -> dict[str, str]:
    """That of this process, with what a launcher sets, and this Python's programs first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ours = {"PYTHONPATH": str(CHECKOUT), "PATH": path, "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
    return {**os.environ, **ours, **{name: str(value) for name, value in more.items()}}


class Node:
    """A process in a session of its own, whose standard error is kept."""

    def __init__(self, said: Path, command: list[str], **variables: str | int) -> None:
        self._said = said
        with said.open("w") as file:
            self.process = subprocess.Popen(
                command, cwd=CHECKOUT, env=environment(**variables), stdout=file, stderr=file, start_new_session=True
            )

    @property
    def said(self) -> str:
        """All that it has written."""
        return self._said.read_text()

    def ended(self, timeout: float = 120) -> int:
        """The exit code, once it is there."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.said[-4000:]}") from None


@contextmanager
def all_gone(*nodes: Node) -> Iterator[None]:
    """Nothing of theirs is left afterwards, whatever happens."""
    try:
        yield
    finally:
        for node in nodes:
            for pid in [node.process.pid, *descendants(node.process.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            node.process.wait()


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [found for child in children for found in (int(child), *descendants(int(child)))]


def rank(number: int, port: int, said: Path, *argv: str | Path, ranks: int = 2, **variables: str | int) -> Node:
    """`kvpath` as one rank, started by hand on a machine of its own."""
    launch: dict[str, str | int] = {"RANK": number, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "NODE_RANK": number}
    launch |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return Node(said, [sys.executable, "-m", "kvpath", *map(str, argv)], **{**launch, **variables})


def by_script(name: str, number: int, port: int, said: Path, *argv: str | Path, **variables: str | int) -> Node:
    """A launcher of `scripts/launch` on one of two machines, each of which has one rank."""
    site = {"NODES": 2, "NODE_RANK": number, "RANKS_PER_NODE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return Node(said, [str(LAUNCHERS / name), *map(str, argv)], **{**site, **variables})


def wait_for_steps(run: Path, steps: int, *nodes: Node, timeout: float = 120) -> None:
    """Until a run has logged so many steps; none of the nodes may end before."""
    metrics, by = run / "metrics.jsonl", time.monotonic() + timeout
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        for node in nodes:
            assert node.process.poll() is None, node.said[-4000:]
        assert time.monotonic() < by, [node.said[-2000:] for node in nodes]
        time.sleep(0.05)


def errors(*nodes: Node) -> list[str]:
    """The lines in which kvpath names a mistake."""
    return [line for node in nodes for line in node.said.splitlines() if line.startswith("kvpath: error: ")]
