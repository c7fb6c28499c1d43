import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import DistNetworkError, DistStoreError

from kvpath.errors import UserError
from kvpath.training import meeting
from kvpath.training.deepspeed.strategy import ZeRO
from tests.nodes import Node, all_gone, free_port
from tests.runs import kvpath

SOON = timedelta(seconds=1)

LEAVES_WHILE_SENDING = """
import atexit
import torch
from torch import distributed
from kvpath.training.meeting import leave_the_others

distributed.init_process_group("gloo")
atexit.register(leave_the_others)
held = distributed.new_group()
for _ in range(100):
    for group in (held, distributed.group.WORLD):
        distributed.all_reduce(torch.ones(10), group=group, async_op=True)
"""


@pytest.fixture
def met_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], int]:
    """Makes a port the one at which ranks meet."""

    def meet(port: int) -> int:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        return port

    return meet


def test_a_port_at_which_nobody_is_ends_in_time(met_at: Callable[[int], int]) -> None:
    port = met_at(free_port())
    with pytest.raises(meeting.NotMet, match=rf"127.0.0.1:{port} \(.*refused for 1 s\)"):
        meeting._wait_for("127.0.0.1", port, SOON)


def test_a_port_that_takes_connections_and_does_not_answer_ends_in_time(
    met_at: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "MARGIN", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = met_at(other.getsockname()[1])
        meeting._wait_for("127.0.0.1", port, SOON)
        with pytest.raises(meeting.NotMet, match=rf"127.0.0.1:{port} \(what has the port does not answer for 1 s\)"):
            meeting._store(1, 2, SOON)


def test_ranks_that_do_not_come_and_a_port_that_is_taken_are_mistakes(met_at: Callable[[int], int]) -> None:
    met_at(free_port())
    with pytest.raises(DistStoreError) as alone:
        meeting._store(0, 2, SOON)
    assert "1/2 clients joined" in str(meeting.not_met(alone.value))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = met_at(other.getsockname()[1])
        with pytest.raises(DistNetworkError) as taken:
            meeting._store(0, 2, SOON)
    mistake = meeting.not_met(taken.value)
    assert mistake is not None
    assert mistake.on_every_machine
    assert f"127.0.0.1:{port} (" in str(mistake)
    assert "already in use" in str(mistake)


def test_once_they_have_met_such_an_error_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    error = DistNetworkError("connection reset")
    assert isinstance(meeting.not_met(error), UserError)
    assert meeting.not_met(RuntimeError("of anything else")) is None
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert meeting.not_met(error) is None


def test_every_strategy_of_hardware_meets_in_time() -> None:
    assert issubclass(ZeRO, meeting.MeetsInTime)
    assert issubclass(meeting.DDP, meeting.MeetsInTime)


def test_a_timeout_is_positive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="timeout_minutes must be positive, got 0"):
        meeting.DDP(timeout_minutes=0)
    argv = ["-c", "demo/base", "-c", "demo/gqa", "-c", "hardware/ddp", "--trainer.strategy.timeout_minutes", "-1"]
    assert kvpath("fit", *argv, "--run", "nowhere") == 2
    assert "trainer.strategy DDP: timeout_minutes must be positive, got -1.0" in capsys.readouterr().err


def test_a_rank_that_ends_while_somebody_holds_its_group_ends_well(tmp_path: Path) -> None:
    port = free_port()
    ranks = [
        Node(
            tmp_path / f"{rank}.txt",
            [sys.executable, "-c", LEAVES_WHILE_SENDING],
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "RANK": rank},
        )
        for rank in range(2)
    ]
    with all_gone(*ranks):
        assert [rank.ended() for rank in ranks] == [0, 0], [rank.said for rank in ranks]
