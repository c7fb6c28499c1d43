"""The package as others get it: a wheel built from a clean copy of the tree, installed elsewhere, and its imports."""

import ast
import configparser
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent
MODULES = sorted((CHECKOUT / "kvpath").rglob("*.py"))

# Which layer a part belongs to; it may import its own layer and the ones before.
LAYERS = [{"attention"}, {"model"}, {"analysis"}, {"evaluation", "inference", "interop", "training"}, {"report"}]


def name_of(module: Path) -> str:
    return module.relative_to(CHECKOUT).as_posix()


def tracked_files() -> list[str]:
    """What a clone will have: the files that git knows, or would add."""
    git = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not in a git checkout")
    return [name for name in listed.stdout.splitlines() if (CHECKOUT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    clean = tmp_path_factory.mktemp("clean")
    for name in tracked_files():
        (clean / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(CHECKOUT / name, clean / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", "wheels", "."]
    subprocess.run(pip, cwd=clean, check=True)
    (wheel,) = (clean / "wheels").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of a new venv that holds the wheel and sees the packages of this one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    packages_here = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages / "packages_of_the_tests.pth").write_text("\n".join(packages_here) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--ignore-installed", str(wheel)], check=True)
    return folder / "bin"


def run(command: list[str | Path], folder: Path) -> str:
    """What the command prints, run in ``folder`` without a PYTHONPATH that could lead back to the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_wheel_has_every_module_and_piece(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("kvpath/")}
    modules = {name for name in tracked_files() if name.startswith("kvpath/")}
    pieces = {f"kvpath/{name}" for name in tracked_files() if re.fullmatch(r"configs/.*\.yaml", name)}
    assert "kvpath/py.typed" in packed
    assert packed == modules | pieces


def test_installed_command_lists_the_pieces_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    configs = CHECKOUT / "configs"
    names = sorted(path.relative_to(configs).with_suffix("").as_posix() for path in configs.rglob("*.yaml"))
    assert names
    for command in ([installed / "kvpath"], [installed / "python", "-m", "kvpath"]):
        listed = run([*command, "configs"], tmp_path)
        assert sorted(line.split()[0] for line in listed.splitlines()) == names


def test_installed_package_is_the_one_that_was_asked(installed: Path, tmp_path: Path) -> None:
    where = Path(run([installed / "python", "-c", "import kvpath; print(kvpath.__file__)"], tmp_path).strip())
    assert where.is_relative_to(installed.parent)


IMPORTS_CHANGE_NOTHING = """
import importlib.util, os, pkgutil, random, sys
import numpy, torch, torchmetrics, datasets, tokenizers, jsonargparse, lightning.pytorch

class Untouchable:
    def __getattribute__(self, name):
        raise AssertionError("an import reads sys.argv")

def state():
    return {
        "python seed": random.getstate(), "numpy seed": str(numpy.random.get_state()),
        "torch seed": torch.get_rng_state().tolist(), "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(), "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(), "grad": torch.is_grad_enabled(),
        "environment": dict(os.environ),
    }

before, argv = state(), sys.argv
sys.argv = Untouchable()
import kvpath
modules = [module.name for module in pkgutil.walk_packages(kvpath.__path__, "kvpath.")]
for module in modules:
    if module != "kvpath.evaluation.lm_eval" or importlib.util.find_spec("lm_eval"):
        __import__(module)
sys.argv = argv
print(len(modules), [name for name, value in state().items() if value != before[name]])
"""


def test_imports_read_no_argv_and_change_nothing_global(tmp_path: Path) -> None:
    subprocess_code = f"import sys; sys.path.insert(0, {str(CHECKOUT)!r})\n{IMPORTS_CHANGE_NOTHING}"
    count, changed = run([sys.executable, "-c", subprocess_code], tmp_path).split(maxsplit=1)
    assert int(count) > 10
    assert changed.strip() == "[]"


def imports_of(node: ast.AST, inside_functions: bool) -> Iterator[str]:
    """The dotted names that importing a file imports; with what its functions import too, if wanted.

    What stands in a ``try`` is guarded; what stands under ``if TYPE_CHECKING`` never runs.
    """
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
            case ast.ImportFrom():
                raise AssertionError("imports are absolute here")
            case ast.Try() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not inside_functions:
                pass
            case _:
                yield from imports_of(child, inside_functions)


def imports_in(module: Path, inside_functions: bool = False) -> list[str]:
    return list(imports_of(ast.parse(module.read_text(encoding="utf-8")), inside_functions))


def test_what_is_imported_at_once_is_required() -> None:
    setup = configparser.ConfigParser()
    setup.read(CHECKOUT / "setup.cfg")
    lines = setup["options"]["install_requires"].split("\n")
    required = {name[0].lower() for line in lines if (name := re.match(r"[\w.-]+", line))}
    distributions = importlib.metadata.packages_distributions()
    missing = [
        f"{name_of(module)}: {package}"
        for module in MODULES
        for package in {name.split(".")[0] for name in imports_in(module)} - sys.stdlib_module_names - {"kvpath"}
        if (name_of(module), package) != ("kvpath/evaluation/lm_eval.py", "lm_eval")  # whose caller names the extra
        and not required & {name.lower() for name in distributions.get(package, [])}
    ]
    assert missing == []


def test_imports_run_downwards() -> None:
    layer_of = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}
    upwards = [
        f"{name_of(module)}: {name}"
        for module in MODULES
        for name in imports_in(module, inside_functions=True)
        if name.startswith("kvpath.")
        and (part := module.relative_to(CHECKOUT).parts[1]) in layer_of
        and layer_of.get(name.split(".")[1], -1) > layer_of[part]
    ]
    assert upwards == []


def test_data_stands_beside() -> None:
    parts = {part for layer in LAYERS for part in layer}
    found = [
        f"{name_of(module)}: {name}"
        for module in MODULES
        if module.is_relative_to(CHECKOUT / "kvpath/data")
        for name in imports_in(module, inside_functions=True)
        if name.startswith("kvpath.") and name.split(".")[1] in parts
    ]
    assert found == []
