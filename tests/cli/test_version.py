import subprocess
import sys

import lightning
import torch

import kvpath.version
from kvpath.cli.version import version


def test_says_the_versions_that_run() -> None:
    lines = dict(line.split(maxsplit=1) for line in version().splitlines())
    assert list(lines) == ["kvpath", "python", "torch", "lightning", "deepspeed", "CUDA"]
    assert lines["kvpath"] == kvpath.version.__version__
    assert lines["python"] == sys.version.split()[0]
    assert lines["torch"] == torch.__version__
    assert lines["lightning"] == lightning.__version__
    assert lines["CUDA"] == (torch.version.cuda or "none in this build of torch")


def test_does_not_import_torch() -> None:
    code = "import sys; from kvpath.cli.version import version; version(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
