"""What is read of a launcher's environment, and what of the Trainer's flags follows from it."""

from typing import Any

import pytest

from kvpath.errors import UserError
from kvpath.launch import Launch, is_first_of_machine, is_first_rank

MET = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", **MET}
TORCHRUN |= {"GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}
DEEPSPEED = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "4", **MET}
DEEPSPEED |= {"CROSS_RANK": "1", "CROSS_SIZE": "2"}
BY_HAND = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", **MET}
SLURM = {"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "kvpath"}
SLURM |= {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
OF_LIGHTNING = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", **MET}


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*TORCHRUN, *DEEPSPEED, *SLURM, *OF_LIGHTNING}:
        monkeypatch.delenv(name, raising=False)


def within(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        (TORCHRUN, Launch("torchrun", 5, 1, 1, 8, 4, 2)),
        (DEEPSPEED, Launch("deepspeed", 5, 1, 1, 8, 4, 2)),
        (BY_HAND, Launch("the launcher", 1, 0, 0, 2, None, None)),
        (BY_HAND | {"NODE_RANK": "1"}, Launch("the launcher", 1, 0, 1, 2, None, None)),
        (SLURM, Launch("SLURM", 5, 1, 1, 8, 4, 2)),
        (SLURM | TORCHRUN, Launch("torchrun", 5, 1, 1, 8, 4, 2)),
        (SLURM | {"SLURM_JOB_NAME": "bash"}, None),
        (OF_LIGHTNING, None),
        ({}, None),
    ],
    ids=["torchrun", "deepspeed", "by hand", "with node", "slurm", "torchrun in slurm", "interactive", "own", "none"],
)
def test_launchers_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], launch: Launch | None
) -> None:
    within(monkeypatch, variables)
    assert Launch.from_environment() == launch


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({**BY_HAND, "RANK": "one"}, "RANK in the environment must be a whole number, got 'one'"),
        ({**BY_HAND, "MASTER_PORT": "70000"}, "MASTER_PORT in the environment must be a port, under 65536, got 70000"),
        ({k: v for k, v in BY_HAND.items() if k not in MET}, "MASTER_ADDR must be .*; MASTER_PORT must be "),
        ({k: v for k, v in SLURM.items() if k != "SLURM_NTASKS_PER_NODE"}, "8 tasks, .*state --ntasks-per-node"),
    ],
)
def test_half_of_an_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    within(monkeypatch, variables)
    with pytest.raises(UserError, match=message):
        Launch.from_environment()


EIGHT = Launch("torchrun", 5, 1, 1, 8, 4, 2)
UNSAID = Launch("the launcher", 1, 0, 0, 2, None, None)


@pytest.mark.parametrize(
    ("launch", "given", "settled"),
    [
        (EIGHT, ("auto", 1), (4, 2)),
        (EIGHT, (-1, 1), (4, 2)),
        (EIGHT, ("-1", 2), (4, 2)),
        (EIGHT, (4, 1), (4, 2)),
        (EIGHT, ("0,1,2,3", 2), ("0,1,2,3", 2)),
        (EIGHT, ([0, 1, 2, 3], 1), ([0, 1, 2, 3], 2)),
        (UNSAID, ("auto", 1), (2, 1)),
        (UNSAID, ("auto", 2), (1, 2)),
        (UNSAID, (1, 2), (1, 2)),
    ],
)
def test_what_is_left_open_follows_the_launcher(launch: Launch, given: tuple[Any, int], settled: Any) -> None:
    assert launch.settle(*given) == settled


@pytest.mark.parametrize(
    ("launch", "given"),
    [(EIGHT, (8, 1)), (EIGHT, (2, 4)), (EIGHT, (4, 3)), (EIGHT, ([0, 1], 1)), (UNSAID, (1, 1)), (UNSAID, (2, 2))],
)
def test_what_contradicts_it_is_refused_by_both_numbers(launch: Launch, given: tuple[Any, int]) -> None:
    with pytest.raises(UserError) as caught:
        launch.settle(*given)
    assert f"trainer.devices={given[0]} on trainer.num_nodes={given[1]} is not what {launch.launcher}" in str(
        caught.value
    )
    assert f"{launch.ranks} ranks" in str(caught.value)


def test_another_number_on_each_machine_is_refused() -> None:
    with pytest.raises(UserError, match="3 ranks, 2 on each machine"):
        Launch("torchrun", 0, 0, 0, 3, 2, 2).settle("auto", 1)


@pytest.mark.parametrize(
    ("variables", "of_run", "of_machine"),
    [
        ({}, True, True),
        (TORCHRUN, False, False),
        (TORCHRUN | {"RANK": "4", "LOCAL_RANK": "0"}, False, True),
        (TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}, True, True),
        (SLURM, False, False),
        (SLURM | {"SLURM_PROCID": "4", "SLURM_LOCALID": "0"}, False, True),
        (SLURM | TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}, True, True),
        (OF_LIGHTNING, False, False),
        ({"NODE_RANK": "1"}, False, True),
    ],
)
def test_who_speaks(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], of_run: bool, of_machine: bool) -> None:
    within(monkeypatch, variables)
    assert (is_first_rank(), is_first_of_machine()) == (of_run, of_machine)
