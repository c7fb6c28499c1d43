import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment

from kvpath.errors import UserError
from kvpath.launch import Launch
from kvpath.training.launched import Launched, environment_of

SIX = Launch("deepspeed", rank=5, local_rank=2, node_rank=1, ranks=6, per_machine=3, machines=2)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29501")
    environment = environment_of(SIX)
    assert isinstance(environment, Launched)
    return environment


def test_it_says_what_the_launcher_says(launched: Launched) -> None:
    launched.set_world_size(1)
    launched.set_global_rank(0)
    assert (launched.main_address, launched.main_port, launched.creates_processes_externally) == (
        "10.0.0.1",
        29501,
        True,
    )
    ranks = launched.world_size(), launched.global_rank(), launched.local_rank(), launched.node_rank()
    assert ranks == (6, 5, 2, 1)
    launched.validate_settings(num_devices=3, num_nodes=2)
    with pytest.raises(UserError, match="trainer.devices=2 on trainer.num_nodes=3 is not what deepspeed has started"):
        launched.validate_settings(num_devices=2, num_nodes=3)


def test_a_trainer_has_the_rank_of_the_second_machine(launched: Launched) -> None:
    trainer = Trainer(
        accelerator="cpu", devices=3, num_nodes=2, strategy="ddp", plugins=[launched], logger=False, barebones=True
    )
    ranks = trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size
    assert ranks == (5, 2, 1, 6)
    assert not trainer.is_global_zero


def test_it_is_found_in_an_environment_but_not_under_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Launched.detect()
    for name, value in {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "kvpath"}.items():
        monkeypatch.setenv(name, value)
    assert not Launched.detect()
    launch = Launch.from_environment()
    assert launch is not None
    environment = environment_of(launch)
    assert isinstance(environment, SLURMEnvironment)
    assert not environment.auto_requeue
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert Launched.detect()
