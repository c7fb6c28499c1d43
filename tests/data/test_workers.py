"""A worker that dies is named; any other fault keeps its own words."""

import os
import signal
import subprocess
import sys

import pytest
from torch.utils.data import Dataset

from kvpath.data.workers import dead_worker, read_ahead
from kvpath.errors import UserError


class Dies(Dataset[int]):
    """Its third item kills the process that makes it."""

    def __getitem__(self, number: int) -> int:
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return number


class Breaks(Dataset[int]):
    def __getitem__(self, number: int) -> int:
        raise RuntimeError("broken")


def test_a_killed_worker_is_one_line() -> None:
    with pytest.raises((UserError, RuntimeError)) as raised:
        list(read_ahead(Dies(), 2, sampler=range(8)))
    # torch may say so from wherever the main process is
    said = raised.value if isinstance(raised.value, UserError) else dead_worker(raised.value)
    assert "data worker with process number " in str(said)
    assert "too little memory; lower data.num_workers" in str(said)
    assert "\n" not in str(said)


class ToldToEnd(Dataset[int]):
    def __getitem__(self, number: int) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return number


def test_workers_leave_it_to_the_run_to_end() -> None:
    assert list(read_ahead(ToldToEnd(), 2, sampler=range(6))) == list(range(6))


def test_other_faults_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        list(read_ahead(Breaks(), 0, sampler=range(1)))
    assert dead_worker(RuntimeError("DataLoader is odd")) is None


@pytest.mark.parametrize(
    ("said", "ending"),
    [
        ("DataLoader worker (pid 123) is killed by signal: Killed. ", "123 died (killed by signal: Killed)"),
        ("DataLoader worker (pid(s) 4, 5) exited unexpectedly", "4, 5 died (unexpectedly)"),
        (
            "DataLoader worker (pid 7) exited unexpectedly with exit code 1. Details are lost",
            "7 died (unexpectedly with exit code 1)",
        ),
        (
            "DataLoader worker (pid 8) is killed by signal: Bus error. It is possible that workers are out",
            "8 died (killed by signal: Bus error): the usual reasons are a file of the data that was cut off while it",
        ),
    ],
)
def test_what_torch_says(said: str, ending: str) -> None:
    assert ending in str(dead_worker(RuntimeError(said)))


FORKED = """
import tokenizers
from tokenizers import models, pre_tokenizers
from torch.utils.data import Dataset
from kvpath.data.workers import read_ahead

inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
TEXTS = ["a b a"] * 64


class Tokenises(Dataset):
    def __getitem__(self, number):
        return [encoding.ids for encoding in inner.encode_batch_fast(TEXTS)]


if __name__ == "__main__":
    inner.encode_batch_fast(TEXTS)
    assert list(read_ahead(Tokenises(), 2, sampler=range(4))) == [[[0, 1, 0]] * 64] * 4
"""


def test_workers_do_not_wait_for_threads_of_the_tokenizer_that_a_fork_leaves_behind() -> None:
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", FORKED], env=environment, check=True, timeout=120)
