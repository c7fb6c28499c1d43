"""What launchers say in the environment: which rank this process is, and how many there are on how many machines."""

import os
from dataclasses import dataclass
from typing import Any

from kvpath.errors import UserError


def is_first_rank() -> bool:
    """Whether this process is rank 0 of its run, before anything else is known of it."""
    if (rank := os.environ.get("RANK")) is not None:
        return rank == "0"
    # Lightning's own launcher gives the first two, SLURM the third.
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"))


def is_first_of_machine() -> bool:
    """Whether this process is the first rank of its machine."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


@dataclass(frozen=True)
class Launch:
    """The ranks that a launcher has started.

    Args:
        launcher: who, for people.
        rank: of this process, in the run.
        local_rank: of this process, on its machine.
        node_rank: of its machine.
        ranks: of the run.
        per_machine: ranks on each machine; None if the launcher does not say.
        machines: None if the launcher does not say.
    """

    launcher: str
    rank: int
    local_rank: int
    node_rank: int
    ranks: int
    per_machine: int | None
    machines: int | None

    @classmethod
    def from_environment(cls) -> "Launch | None":
        """What torchrun, `deepspeed`, or anything else that sets RANK, WORLD_SIZE and LOCAL_RANK says; None if none.

        SLURM is asked only if there is no other inside of it, and not by variables that an interactive job leaves.

        Raises:
            UserError: it says only half of it.
        """
        if all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
            UserError.raise_all(
                f"{name} must be in the environment, as RANK and WORLD_SIZE are: where rank 0 is to be met"
                for name in ("MASTER_ADDR", "MASTER_PORT")
                if name not in os.environ
            )
            if (port := _number("MASTER_PORT")) is not None and port >= 1 << 16:
                raise UserError(f"MASTER_PORT in the environment must be a port, under 65536, got {port}")
            launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "the launcher"
            return cls(
                launcher="deepspeed" if "CROSS_RANK" in os.environ else launcher,
                rank=_number("RANK") or 0,
                local_rank=_number("LOCAL_RANK") or 0,
                node_rank=_number("GROUP_RANK", "CROSS_RANK", "NODE_RANK") or 0,
                ranks=_number("WORLD_SIZE") or 1,
                per_machine=_number("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
                machines=_number("GROUP_WORLD_SIZE", "CROSS_SIZE"),
            )
        if not by_slurm():
            return None
        ranks, per_machine = _number("SLURM_NTASKS") or 1, _number("SLURM_NTASKS_PER_NODE")
        if ranks > 1 and per_machine is None:
            raise UserError(f"SLURM has started {ranks} tasks, but not how many a node: state --ntasks-per-node")
        return cls(
            launcher="SLURM",
            rank=_number("SLURM_PROCID") or 0,
            local_rank=_number("SLURM_LOCALID") or 0,
            node_rank=_number("SLURM_NODEID") or 0,
            ranks=ranks,
            per_machine=per_machine,
            machines=_number("SLURM_NNODES"),
        )

    def settle(self, devices: Any, num_nodes: int) -> tuple[Any, int]:
        """The Trainer's `devices` and `num_nodes`: where they are left open, those that the launcher has started.

        Args:
            devices: As in the Trainer; "auto" and -1 leave it open.
            num_nodes: 1, which every piece states, leaves it open.

        Raises:
            UserError: they contradict the launcher.
        """
        stated = count_of(devices)
        machines = self.machines if num_nodes == 1 and self.machines else num_nodes
        per_machine = stated or self.per_machine or self.ranks // machines
        if per_machine * machines != self.ranks or per_machine != (self.per_machine or per_machine):
            on_each = f", {self.per_machine} on each machine" if self.per_machine else ""
            raise UserError(
                f"trainer.devices={devices} on trainer.num_nodes={num_nodes} is not what {self.launcher} has started:"
                f" {self.ranks} ranks{on_each}; devices auto and num_nodes 1 follow the launcher"
            )
        return (per_machine if stated is None else devices), machines


def by_slurm() -> bool:
    """Whether SLURM's `srun` has started this process."""
    return "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def _number(*names: str) -> int | None:
    for name in names:
        if (value := os.environ.get(name)) is not None:
            if not value.isdecimal():
                raise UserError(f"{name} in the environment must be a whole number, got {value!r}")
            return int(value)
    return None


def count_of(devices: Any) -> int | None:
    """How many devices the Trainer's flag names; None if it leaves that open."""
    if isinstance(devices, list):
        return len(devices)
    if isinstance(devices, str) and "," in devices:
        return len([index for index in devices.split(",") if index.strip()])
    return None if str(devices) in ("auto", "-1") else int(devices)
