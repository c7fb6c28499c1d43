"""What ``kvpath --version`` prints, without the seconds that importing torch takes."""

import platform
import runpy
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path

from kvpath.version import __version__


def version() -> str:
    """One line each for kvpath, python, torch, lightning, deepspeed, and the CUDA that torch was built with."""
    versions = {
        "kvpath": __version__,
        "python": platform.python_version(),
        **{package: _installed(package) for package in ("torch", "lightning", "deepspeed")},
        "CUDA": _cuda(),
    }
    return "\n".join(f"{name:9} {value}" for name, value in versions.items())


def _installed(package: str) -> str:
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return "not installed"


def _cuda() -> str:
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return "not installed"
    build = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    return build.get("cuda") or "none in this build of torch"
