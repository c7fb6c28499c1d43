"""Ranks that a launcher starts: two machines on this one train and resume, a dead rank ends the other, mistakes are
one line, and nothing hangs.
"""

import importlib.util
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kvpath.training.stored_config import read_checkpoint
from tests.nodes import WITHIN, Node, all_gone, by_script, descendants, errors, free_port, rank, wait_for_steps
from tests.runs import kvpath, metrics_of, write_config

DDP = ["-c", "hardware/ddp", "--trainer.precision", "32-true"]
ZERO2 = ["-c", "hardware/zero2", "--trainer.precision", "32-true"]
ZERO3 = ["-c", "hardware/zero3", "--trainer.precision", "32-true"]
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of two micro-batches, validation after every third."""
    return write_config(tmp_path_factory.mktemp("nodes"))


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on one rank, unbroken."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert kvpath("fit", "-c", config, "--run", run) == 0
    return run


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """A run that does not end by itself, saved after every second step."""
    changes: dict[str, Any] = {"data__budget__tokens": 20_000 * 64, "every__save": "2 steps"}
    return write_config(tmp_path, "long.yaml", every__validate="1000000 steps", **changes)


def assert_same_numbers(run: Path, whole: Path) -> None:
    ours, theirs = metrics_of(run), metrics_of(whole)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for line, other in zip(ours, theirs, strict=True):
        for name in ("train/loss", "train/gradient_norm", "validation/loss"):
            assert line.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=1e-5), (line["step"], name)
        assert line.get("data/stream_hash") == other.get("data/stream_hash")
    losses = [line["train/loss"] for line in ours if "train/loss" in line]
    curve = EventAccumulator(str(run / "tb")).Reload().Scalars("train/loss")
    assert [point.step for point in curve] == list(range(1, 7))
    assert [point.value for point in curve] == pytest.approx(losses)
    weights = [read_checkpoint(directory / "checkpoints" / "last.ckpt")["state_dict"] for directory in (run, whole)]
    for name, value in weights[1].items():
        torch.testing.assert_close(weights[0][name], value, rtol=1e-4, atol=1e-5)


def trained_in_two_attempts(
    script: str, config: Path, tmp_path: Path, hardware: list[str], then: list[str] | None = None
) -> Path:
    """The run directory of two machines that stopped after the third step and were started again."""
    run = tmp_path / "run"
    for attempt, more in enumerate([[*hardware, "--trainer.max_steps", "3"], then or hardware]):
        port, files = free_port(), [tmp_path / f"{attempt}-{number}.txt" for number in range(2)]
        variables: dict[str, str] = {}
        if script == "deepspeed":
            (tmp_path / "hosts").write_text("one slots=1\ntwo slots=1\n")
            variables["HOSTFILE"] = str(tmp_path / "hosts")
        nodes = [
            by_script(script, number, port, files[number], "-c", config, "--run", run, *more, **variables)
            for number in range(2)
        ]
        with all_gone(*nodes):
            assert [node.ended() for node in nodes] == [0, 0], [node.said[-4000:] for node in nodes]
    assert json.loads((run / "summary.json").read_text())["step"] == 6
    assert "resuming from" in nodes[0].said
    assert "resuming from" not in nodes[1].said
    return run


@on_linux
def test_two_nodes_of_torchrun_train_and_resume_as_one_rank_does(config: Path, whole: Path, tmp_path: Path) -> None:
    assert_same_numbers(trained_in_two_attempts("torchrun", config, tmp_path, DDP), whole)


@on_linux
@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize(("script", "then"), [("torchrun", ZERO2), ("deepspeed", ZERO2), ("torchrun", ZERO3)])
def test_two_nodes_with_zero_do_so_too(script: str, then: list[str], config: Path, whole: Path, tmp_path: Path) -> None:
    assert_same_numbers(trained_in_two_attempts(script, config, tmp_path, ZERO2, then), whole)


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["TERM", "USR1"])
@pytest.mark.parametrize("script", ["torchrun", "deepspeed"])
def test_a_stop_is_75_of_the_launcher_too(script: str, number: signal.Signals, long: Path, tmp_path: Path) -> None:
    if script == "deepspeed":
        pytest.importorskip("deepspeed")
    run, port = tmp_path / "run", free_port()
    (tmp_path / "hosts").write_text("one slots=1\ntwo slots=1\n")
    variables = {"HOSTFILE": str(tmp_path / "hosts")} if script == "deepspeed" else {}
    nodes = [
        by_script(script, n, port, tmp_path / f"{n}.txt", "-c", long, *DDP, "--run", run, **variables) for n in range(2)
    ]
    with all_gone(*nodes):
        wait_for_steps(run, 3, *nodes)
        os.kill(nodes[0].process.pid, number)
        codes = [node.ended() for node in nodes]
    assert codes[0] == 75, nodes[0].said[-4000:]
    step = read_checkpoint(run / "checkpoints" / "last.ckpt")["global_step"]
    assert f"saved and stopped at step {step:,}" in nodes[0].said
    assert metrics_of(run)[-1]["step"] == step


# Death ----------------------------------------------------------------------------------------------------------------


def goes_on(run: Path, long: Path, tmp_path: Path) -> None:
    """The same two ranks go on from the last checkpoint, to an end that is near."""
    step = read_checkpoint(run / "checkpoints" / "last.ckpt")["global_step"]
    port, until = free_port(), str(step + 2)
    fit = ["fit", "-c", long, *DDP, "--run", run, "--ckpt_path", "last", "--trainer.max_steps", until]
    nodes = [rank(number, port, tmp_path / f"again{number}.txt", *fit) for number in range(2)]
    with all_gone(*nodes):
        assert [node.ended() for node in nodes] == [0, 0], [node.said[-4000:] for node in nodes]
    assert f"resuming from {run}/checkpoints/last.ckpt, step {step:,}" in nodes[0].said
    assert read_checkpoint(run / "checkpoints" / "last.ckpt")["global_step"] == step + 2


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_rank_ends_the_other_and_the_job_goes_on(dead: int, long: Path, tmp_path: Path) -> None:
    run, port = tmp_path / "run", free_port()
    fit = ["fit", "-c", long, *DDP, "--run", run]
    nodes = [rank(number, port, tmp_path / f"{number}.txt", *fit) for number in range(2)]
    with all_gone(*nodes):
        wait_for_steps(run, 5, *nodes)
        nodes[dead].process.kill()
        assert nodes[1 - dead].ended(WITHIN) not in (0, 75)
    goes_on(run, long, tmp_path)


@on_linux
@pytest.mark.slow
def test_a_dead_rank_ends_both_nodes_of_torchrun(long: Path, tmp_path: Path) -> None:
    run, port = tmp_path / "run", free_port()
    nodes = [
        by_script("torchrun", number, port, tmp_path / f"{number}.txt", "-c", long, *DDP, "--run", run)
        for number in range(2)
    ]
    with all_gone(*nodes):
        wait_for_steps(run, 5, *nodes)
        everything = [pid for node in nodes for pid in descendants(node.process.pid)]
        (worker,) = [pid for pid in descendants(nodes[1].process.pid) if environment_of(pid).get("RANK") == "1"][:1]
        os.kill(worker, signal.SIGKILL)
        assert all(node.ended(WITHIN) not in (0, 75) for node in nodes)
        by = time.monotonic() + 5
        while left := [pid for pid in everything if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < by, left
            time.sleep(0.05)
    goes_on(run, long, tmp_path)


def environment_of(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(pair.decode().split("=", 1) for pair in pairs if b"=" in pair)


# Mistakes -------------------------------------------------------------------------------------------------------------

SHORT = ["--trainer.strategy.timeout_minutes", "0.05"]


@on_linux
@pytest.mark.slow
def test_ports_that_do_not_answer_or_are_taken_are_one_line(config: Path, tmp_path: Path) -> None:
    fit = ["fit", "-c", config, *DDP, *SHORT, "--run"]
    with socket.create_server(("127.0.0.1", 0)) as other:
        nobody, taken = free_port(), int(other.getsockname()[1])
        nodes = {
            "nobody is there": rank(1, nobody, tmp_path / "alone.txt", *fit, tmp_path / "a"),
            "nobody comes": rank(0, free_port(), tmp_path / "waits.txt", *fit, tmp_path / "b"),
            "taken": rank(0, taken, tmp_path / "taken.txt", *fit, tmp_path / "c"),
            "another is there": rank(1, taken, tmp_path / "other.txt", *fit, tmp_path / "d"),
        }
        with all_gone(*nodes.values()):
            codes = {name: node.ended(WITHIN) for name, node in nodes.items()}
    assert codes == dict.fromkeys(nodes, 2), {name: node.said[-2000:] for name, node in nodes.items()}
    for name, node in nodes.items():
        (line,) = errors(node)
        assert "did not meet at MASTER_ADDR:MASTER_PORT = 127.0.0.1:" in line, name
        assert node.said.splitlines()[-1] == line, name
        assert "Traceback" not in node.said, name
    assert len(nodes["nobody is there"].said.splitlines()) == 1
    assert f"127.0.0.1:{nobody} " in errors(nodes["nobody is there"])[0]
    assert not (tmp_path / "b").exists()


def on_two_ranks(config: Path, tmp_path: Path, *argv: str) -> tuple[int, Node]:
    """The exit code of torchrun's script with two ranks on one machine."""
    run = ["-c", config, *DDP, "--run", tmp_path / "run"]
    node = by_script(
        "torchrun", 0, free_port(), tmp_path / "said.txt", *run, *argv, NODES=1, RANKS_PER_NODE=2, OMP_NUM_THREADS=1
    )
    with all_gone(node):
        return node.ended(WITHIN), node


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--data.budget.global_batch_sequences", "6", "--trainer.devices", "auto"],
            "6 is not a multiple of world_size 2",
        ),
        (
            ["--trainer.devices", "1"],
            "trainer.devices=1 on trainer.num_nodes=1 is not what torchrun has started: 2 ranks",
        ),
    ],
)
def test_a_mistake_on_all_ranks_is_one_line(config: Path, tmp_path: Path, flags: list[str], message: str) -> None:
    code, node = on_two_ranks(config, tmp_path, *flags)
    (line,) = errors(node)
    assert message in line
    assert code == 2


def test_a_contradiction_with_the_launcher_is_refused_before_ranks_meet(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    for name, value in {**launch, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    assert kvpath("fit", "-c", config, "--run", tmp_path / "run") == 2
    said = "trainer.devices=1 on trainer.num_nodes=1 is not what the launcher has started: 4 ranks, 2 on each machine"
    assert said in capsys.readouterr().err
    monkeypatch.delenv("KVPATH_RUN", raising=False)
    assert kvpath("fit", "-c", config) == 2
    assert "the launcher has started 4 ranks, which need one --run" in capsys.readouterr().err


def test_the_exit_code_is_written_down_for_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = tmp_path / "codes"
    monkeypatch.setenv("KVPATH_EXIT_CODES", str(codes))
    assert kvpath("configs") == 0
    assert kvpath("fit", "--no_such_flag", "1") == 2
    monkeypatch.setattr("kvpath.cli.main._dispatch", lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        kvpath("fit")
    assert codes.read_text().splitlines() == ["started", "0", "started", "2", "started", "1"]
