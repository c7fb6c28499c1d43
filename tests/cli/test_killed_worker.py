"""A data worker that the system kills ends the run in one line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs import toy_config, write_config

CHECKOUT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_it_is_named_and_memory_is_suspected(tmp_path: Path) -> None:
    budget = {**toy_config(tmp_path)["data"]["budget"], "tokens": 20_000 * 64}
    config = write_config(tmp_path, data__budget=budget, data__num_workers=2, every__validate="1000000 steps")
    metrics = tmp_path / "run" / "metrics.jsonl"
    command = [sys.executable, "-m", "kvpath", "fit", "-c", str(config), "--run", str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=CHECKOUT, stderr=subprocess.PIPE, text=True) as run:
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            assert run.poll() is None
            time.sleep(0.05)
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        _, said = run.communicate(timeout=60)
    assert run.returncode == 2
    assert said.splitlines()[-1].startswith(f"kvpath: error: data worker with process number {children[-1]} died")
    assert "Traceback" not in said
