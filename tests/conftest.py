"""Every test starts from the same seeds, on one thread, with a cache of its own session instead of the user's."""

import functools
import os
import random
import sys
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
import torch


def pytest_configure() -> None:
    # In the environment, so that the processes which tests start have them too.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if item.get_closest_marker("network") and not hub_answers():
        pytest.skip("no network")


@functools.cache
def hub_answers() -> bool:
    from huggingface_hub.constants import ENDPOINT

    try:
        urllib.request.urlopen(ENDPOINT, timeout=10).close()
    except OSError:
        return False
    return True


@pytest.fixture(autouse=True, scope="session")
def cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPATH_CACHE", str(tmp_path_factory.mktemp("kvpath_cache")))
        yield


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def first_rank() -> None:
    """Lightning remembers for the whole process which rank the environment once said it was."""
    if (remembering := sys.modules.get("lightning_utilities.core.rank_zero")) is not None:
        remembering.rank_zero_only.rank = 0
