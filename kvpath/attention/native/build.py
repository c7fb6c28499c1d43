"""Compiles what stands in this folder with the machine's C compiler, once for each version of it and each CPU."""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
WITHOUT_THREADS = tuple(flag for flag in FLAGS if flag != "-fopenmp")
"""For compilers that come without OpenMP."""

SOURCES = sorted(Path(__file__).parent.glob("*.c"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
SWITCH = "KVPATH_NATIVE"
"""An environment variable: 0 leaves all to torch."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None if they are switched off or there is no compiler, with a warning if it fails."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if os.environ.get(SWITCH) == "0" or compiler is None:
        return None
    try:
        return _declared(ctypes.CDLL(str(_compiled(compiler))))
    except subprocess.CalledProcessError as error:
        problem = " ".join(error.stderr.split())[:200]
    except OSError as error:
        problem = str(error)
    warnings.warn(f"decoding runs without compiled functions: {compiler} says {problem}", stacklevel=2)
    return None


def cache_directory() -> Path:
    """Where compiled files lie, for this user alone."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpath" / "native"


def _compiled(compiler: str) -> Path:
    made_of = (*(source.read_text(encoding="utf-8") for source in (*SOURCES, *HEADERS)), compiler, *FLAGS, _cpu())
    file = cache_directory() / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]}.so"
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if file.parent.stat().st_uid != os.getuid():
        raise PermissionError(f"{file.parent} belongs to another user")  # whose code we would run
    if not file.exists():
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / file.name
            try:
                _compile(compiler, FLAGS, made)
            except subprocess.CalledProcessError:
                _compile(compiler, WITHOUT_THREADS, made)
            made.replace(file)  # whole or not at all, whoever else compiles it now
    return file


def _declared(functions: ctypes.CDLL) -> ctypes.CDLL:
    """With the types of arguments that are no pointers to structures: Python's numbers would be taken for 32 bits."""
    at, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    angles = (at, size, size)
    functions.kvpath_norm.argtypes = (at, at, at, size, size, ctypes.c_double, number)
    functions.kvpath_rotate.argtypes = (at, size, size, size, *angles, *angles, at, size, size, size, size, number)
    functions.kvpath_norm.restype = functions.kvpath_rotate.restype = None
    return functions


def _compile(compiler: str, flags: tuple[str, ...], to: Path) -> None:
    command = [*compiler.split(), *flags, *map(str, SOURCES), "-o", str(to), "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True)


def _cpu() -> str:
    """What -march=native depends on: a home directory may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return platform.machine() + "".join(line for line in lines[:40] if line.startswith(("model name", "flags")))
