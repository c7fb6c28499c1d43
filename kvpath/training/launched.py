"""The Trainer's view of ranks that a launcher has started."""

import os

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.plugins.environments import SLURMEnvironment

from kvpath.launch import Launch


class Launched(ClusterEnvironment):
    """Ranks of torchrun, of `deepspeed`, or of anything else that says RANK, WORLD_SIZE and LOCAL_RANK.

    Lightning knows of torchrun alone: with `deepspeed` it would take every machine for the first.
    """

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self.launch = launch

    @property
    def creates_processes_externally(self) -> bool:
        """All of them are there."""
        return True

    @property
    def main_address(self) -> str:
        """Where rank 0 is met."""
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        """At which of its ports."""
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        """Whether there is such a launcher."""
        launch = Launch.from_environment()
        return launch is not None and launch.launcher != "SLURM"

    def world_size(self) -> int:
        """Ranks of the run."""
        return self.launch.ranks

    def set_world_size(self, size: int) -> None:
        """It is the launcher's to say."""

    def global_rank(self) -> int:
        """Of this process, in the run."""
        return self.launch.rank

    def set_global_rank(self, rank: int) -> None:
        """It is the launcher's to say."""

    def local_rank(self) -> int:
        """Of this process, on its machine."""
        return self.launch.local_rank

    def node_rank(self) -> int:
        """Of its machine."""
        return self.launch.node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse another number of ranks.

        Raises:
            UserError: naming both.
        """
        self.launch.settle(num_devices, num_nodes)


def environment_of(launch: Launch) -> ClusterEnvironment:
    """What the Trainer is told of a launch. Under SLURM it must not requeue by itself: the script does."""
    return SLURMEnvironment(auto_requeue=False) if launch.launcher == "SLURM" else Launched(launch)
