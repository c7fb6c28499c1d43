"""A mistake is one line that names what is wrong, and exit code 2: never a traceback, never half a run."""

import errno
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kvpath.training.saving import Saving
from tests.runs import kvpath

CHECKOUT = Path(__file__).parent.parent.parent


def refused(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    """The one line on standard error that a refused command ends with."""
    capsys.readouterr()
    assert kvpath(*argv) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.out == ""
    *_, line = captured.err.splitlines()
    assert line.startswith("kvpath: error: ")
    return line.removeprefix("kvpath: error: ")


CONCAT = "--model.backbone.attention=KVPathConcat"
BACKBONE = "--model.backbone"
ATTENTION = "--model.backbone.attention"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        # What the budget and `every` settle.
        (["--trainer.accumulate_grad_batches=2"], "trainer.accumulate_grad_batches=2 cannot be set here: it follows"),
        (
            ["--trainer.gradient_clip_val=0.5"],
            "trainer.gradient_clip_val=0.5 cannot be set here: state model.optimizer",
        ),
        (["--trainer.val_check_interval=5"], "trainer.val_check_interval=5 cannot be set here: state every.validate"),
        (["--trainer.log_every_n_steps=5"], "trainer.log_every_n_steps=5 cannot be set here: state every.log"),
        (["--trainer.max_epochs=2"], "trainer.max_epochs=2 cannot be set here: state data.budget.tokens"),
        (["--trainer.max_steps=7"], "trainer.max_steps=7 is more than the 6 steps of data.budget"),
        (["--data.budget.micro_batch=3"], "nearest possible: 3 and 6, or budget.micro_batch 2"),
        (["--every.log=5"], "every.log must be like '500 steps', '10M tokens' or '30 minutes', got '5'"),
        (["--trainer.gradient_clip_algorithm=value"], "trainer.gradient_clip_algorithm=value cannot be set here"),
        (["--trainer.default_root_dir=elsewhere"], "trainer.default_root_dir=elsewhere cannot be set here: state run"),
        (["--trainer.enable_checkpointing=false"], "trainer.enable_checkpointing=False cannot be set here: a run"),
        (["--trainer.barebones=true"], "trainer.barebones=True cannot be set here"),
        # What Lightning refuses.
        (["--trainer.max_steps=-5"], "trainer: `max_steps` must be a non-negative integer or -1"),
        (["--trainer.devices=0"], "trainer: `Trainer(devices='0')` value is not a valid input"),
        (["--trainer.strategy=bogus"], "trainer: You selected an invalid strategy name: `strategy='bogus'`"),
        (["--trainer.overfit_batches=0.001"], "trainer.overfit_batches=0.001 is less than one of the 6 steps"),
        # What would leave nothing to do, or be found out late.
        (["--trainer.max_steps=0"], "no step is left to train with trainer.max_steps=0"),
        (["--trainer.limit_train_batches=0"], "no step is left to train"),
        (["--peak_flops=0"], "peak_flops must be positive, got 0"),
        (["--sample.tokens=0", "--sample.temperature=-1"], "sample.tokens must be positive, got 0; sample.temperature"),
        (["--model.z_loss=-1", "--model.seed=-1"], "model.z_loss must not be negative, got -1.0; model.seed"),
        # Unknown keys and wrong types.
        (["--trainer.max_stepz=5"], "did you mean trainer.max_steps?"),
        ([f"{BACKBONE}.n_layer=5"], "did you mean model.backbone.n_layers?"),
        (["--dta.seed=5"], "did you mean data.seed?"),
        (["--ckpt=last"], "unrecognized arguments: --ckpt=last"),
        ([f"{ATTENTION}.init_args.n_headz=5"], "did you mean n_heads?"),
        ([f"{BACKBONE}.n_layers=two"], "model.backbone.n_layers"),
        (["--data.seed=[1]"], "data.seed"),
        (["-c", "no/such/piece"], "no file and no shipped piece is called 'no/such/piece'"),
        # Shapes.
        ([f"{ATTENTION}.n_kv_heads=3"], "n_kv_heads must divide n_heads=2 (one of [1, 2]), got 3"),
        ([f"{ATTENTION}.head_dim=7"], "head_dim is rotated in pairs, so it must be even and not negative, got 7"),
        ([f"{BACKBONE}.d_model=0"], "d_model must be positive, got 0"),
        ([f"{BACKBONE}.vocab_size=299"], "vocab_size must be at least the tokenizer's 300, got 299"),
        (
            [CONCAT, f"{ATTENTION}.delta_dim=8", f"{ATTENTION}.path_length=2"],
            "delta_dim must be between 1 and head_dim - 1 = 7, got 8",
        ),
        (
            [CONCAT, f"{ATTENTION}.delta_dim=3", f"{ATTENTION}.path_length=2"],
            "delta_dim is rotated in pairs, so it must be even and not negative, got 3",
        ),
        (["--model.optimizer.learning_rate=-1"], "optimizer.learning_rate must be positive, got -1"),
        # Data.
        (["--data.source.init_args.files=[nowhere.txt]"], "nowhere.txt"),
        (["--data.source.init_args.text_field=body"], "body"),
        # Types.
        (["--data.budget.tokens=abc"], "data.budget.tokens must be a whole number or a number or null, got abc"),
        (["--data.packing=loose"], "data.packing must be 'contiguous' or 'best_fit', got loose"),
        (["--model.compile=3"], "model.compile must be true or false, got 3"),
        (["--data.budget={tokens: {a: 1}}"], "data.budget.tokens must be a whole number or a number or null, got {'a'"),
        (["--data.eval_contexts=[1.5]"], "data.eval_contexts: 1.5 must be a whole number"),
        (["--every={save: [1]}"], "every.save must be text, got [1]"),
        (["--data.source=null"], "data.source must be a Source, got None"),
        (
            [f"{ATTENTION}=KVPathConcatt"],
            "attention must be the name of a class, got KVPathConcatt; did you mean KVPathC",
        ),
        (["--data.evaluate=3"], "data.evaluate must be keys with values or null, got 3"),
        ([f"{ATTENTION}.n_kv_heads=x"], "n_kv_heads must be a whole number, got x"),
        (
            ["-c", "hardware/ddp", "--trainer.strategy.timeout_minutes=x"],
            "trainer.strategy.timeout_minutes must be a number, got x",
        ),
        (["--trainer.strategy.stage=2"], "trainer.strategy.stage cannot be 2: trainer.strategy is nothing that has"),
    ],
)
def test_fit_refuses(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert message in refused(capsys, "fit", "-c", toy, "--run", tmp_path / "run", *flags)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modle": {"seed": 1}}, "did you mean model.seed?"),
        ({"model": {"backbone": {"d_modell": 8}}}, "did you mean model.backbone.d_model?"),
        ({"data": {"budget": {"token": 8}}}, "did you mean data.budget.tokens?"),
        ({"trainer": {"presicion": "32-true"}}, "did you mean trainer.precision?"),
        ({"model": {"backbone": {"attention": {"init_args": {"n_headz": 2}}}}}, "did you mean n_heads?"),
        ({"model": {"backbone": {"d_model": "wide"}}}, "d_model"),
    ],
)
def test_yaml_is_refused_as_the_command_line_is(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    piece = tmp_path / "piece.yaml"
    piece.write_text(yaml.safe_dump(change))
    assert message in refused(capsys, "fit", "-c", toy, "-c", piece, "--run", tmp_path / "run")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold keys with values, got nothing"),
        ("a: b: c", "cannot be read: mapping values are not allowed here"),
        ("ckpt_path: last", "ckpt_path=last cannot be set in a piece: state --ckpt_path"),
    ],
)
def test_a_piece_that_is_none_is_named(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    piece = tmp_path / "piece.yaml"
    piece.write_text(text)
    assert f"{piece}{':' if 'ckpt' in text else ''} {message}" in refused(
        capsys, "fit", "-c", toy, f"-c={piece}", "--run", tmp_path / "run"
    )


def test_a_run_needs_a_directory(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "that is a file" in refused(capsys, "fit", "-c", toy, "--run", toy)


@pytest.mark.parametrize("argv", [["audit", "--format", "xml"], ["series", "run"], ["configs", "a", "b"]])
def test_other_commands_say_it_in_one_line_too(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert refused(capsys, *argv).startswith(f"kvpath {argv[0]}: ")


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_a_logger_that_is_not_installed(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "fit", "-c", toy, "-c", "logger/wandb", "--run", tmp_path / "run")
    assert "wandb is not installed: pip install wandb" in error


def test_a_command_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "fti") == "there is no command 'fti'; did you mean fit?"


# Checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_never_random_weights(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert f"{command} needs --ckpt_path" in refused(capsys, command, "-c", toy)
    for path, message in ((tmp_path / "none", "there is no such file"), (tmp_path, "no weights in this directory")):
        assert message in refused(capsys, command, "-c", toy, "--ckpt_path", path)


@pytest.fixture
def broken(trained: Path, tmp_path: Path) -> Path:
    """A copy of a run, for tests to break."""
    shutil.copytree(trained, tmp_path / "broken")
    return tmp_path / "broken"


def test_another_shape_lists_tensors_and_sizes(
    toy: Path, broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in (
        ("fit", "--run", broken, "--ckpt_path", "last", "--allow", "[model]"),
        ("test", "--ckpt_path", broken),
        ("fit", "-c", toy, "--run", tmp_path / "new", "--init_from", broken),
    ):
        error = refused(capsys, *argv, "--model.backbone.d_ff=32")
        assert "last.ckpt is of another model: model.blocks.0.mlp." in error
        assert "(24, 16) in the checkpoint, (32, 16) in this model" in error


def test_another_format_version_is_refused(
    toy: Path, broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = broken / "checkpoints" / "last.ckpt"
    for version, messages in (
        (7, ["has format_version 7", "which reads 1"]),
        (None, ["holds no kvpath format_version"]),
    ):
        stored = torch.load(last, weights_only=True)
        stored["kvpath"] = {} if version is None else {**stored["kvpath"], "format_version": version}
        torch.save(stored, last)
        for argv in (
            ("test", "--ckpt_path", broken),
            ("fit", "--run", broken, "--ckpt_path", "last"),
            ("fit", "-c", toy, "--run", tmp_path / "new", "--init_from", last),
        ):
            error = refused(capsys, *argv)
            assert all(message in error for message in messages)


@pytest.mark.parametrize("damage", ["cut short", "empty", "text"])
def test_a_damaged_checkpoint(
    toy: Path, broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    last = broken / "checkpoints" / "last.ckpt"
    whole = last.read_bytes()
    last.write_bytes({"cut short": whole[: len(whole) // 2], "empty": b"", "text": b"no weights here\n" * 50}[damage])
    for argv in (
        ("test", "--ckpt_path", broken),
        ("predict", "-c", toy, "--ckpt_path", last),
        ("fit", "--run", broken, "--ckpt_path", "last"),
        ("fit", "-c", toy, "--run", tmp_path / "new", "--init_from", broken),
    ):
        assert f"{last} is damaged, or no checkpoint of kvpath" in refused(capsys, *argv)


class Payload:
    """What unpickling would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("was_run",)


def test_a_checkpoint_never_runs_code(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {}, "payload": Payload()}, "evil.ckpt")
    assert "evil.ckpt is damaged, or no checkpoint of kvpath" in refused(
        capsys, "test", "-c", toy, "--ckpt_path", "evil.ckpt"
    )
    assert not Path("was_run").exists()


@pytest.mark.parametrize("key", ["peak_flops", "data", "trainer"])
def test_a_run_s_configuration_makes_no_objects_of_any_class(broken: Path, tmp_path: Path, key: str) -> None:
    config = yaml.safe_load((broken / "config.yaml").read_text(encoding="utf-8"))
    payload = {"class_path": "logging.FileHandler", "init_args": {"filename": str(tmp_path / "made")}}
    config[key] = payload if key == "peak_flops" else {**config[key], "seed": payload}
    (broken / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert kvpath("audit", "--ckpt_path", broken) == 0
    assert not (tmp_path / "made").exists()


def test_an_evaluation_leaves_out_the_callbacks_of_a_run(broken: Path, tmp_path: Path) -> None:
    config = yaml.safe_load((broken / "config.yaml").read_text(encoding="utf-8"))
    calls = {"class_path": "lightning.pytorch.callbacks.LambdaCallback", "init_args": {"on_test_start": "os.abort"}}
    config["trainer"]["callbacks"] = [calls]
    (broken / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert kvpath("test", "--ckpt_path", broken, "--output", tmp_path / "results.json") == 0


# The disk -------------------------------------------------------------------------------------------------------------


def test_a_full_disk_keeps_the_checkpoint_before(
    broken: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    last = broken / "checkpoints" / "last.ckpt"
    before = last.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lightning.fabric.utilities.cloud_io.torch.save", full)
    error = refused(
        capsys, "fit", "--run", broken, "--ckpt_path", "last", "--data.budget.tokens=448", "--allow=[horizon]"
    )
    where = broken / "checkpoints"
    assert f"no space left on the disk for a checkpoint in {where}; the one before it is still whole" in error
    assert last.read_bytes() == before


def test_a_full_disk_elsewhere(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(argv: list[str]) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a/file")

    monkeypatch.setattr("kvpath.cli.main._dispatch", full)
    assert refused(capsys, "fit") == "no space left on the disk for a/file"


def test_other_faults_of_the_disk_keep_their_traceback(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_disk(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Saving, "_save", broken_disk)
    with pytest.raises(OSError, match="Input/output error"):
        kvpath("fit", "-c", toy, "--run", tmp_path / "run")


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A disk of its own, with too little room for a checkpoint."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_disk_that_is_full(toy: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "fit", "-c", toy, "--run", small_disk / "run")
    assert "no space left on the disk" in error
    assert not list(small_disk.rglob("*.ckpt"))


# Faults of kvpath -----------------------------------------------------------------------------------------------------

FAULT = """
import sys
import kvpath.cli.main
kvpath.cli.main._dispatch = lambda argv: 1 / 0
sys.argv = ["kvpath", "configs"]
import runpy
runpy.run_module("kvpath", run_name="__main__")
"""

HELP = """
import sys
from kvpath.cli.main import main
code = main(["--help"])
heavy = {"torch", "lightning", "lightning.pytorch", "jsonargparse", "numpy"} & sys.modules.keys()
sys.exit(code or (f"imported {heavy}" if heavy else 0))
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_a_fault_of_kvpath_keeps_its_traceback() -> None:
    ended = python(FAULT)
    assert ended.returncode == 1
    assert "ZeroDivisionError" in ended.stderr


def test_help_is_light() -> None:
    ended = python(HELP)
    assert ended.returncode == 0, ended.stderr
    assert "usage: kvpath COMMAND" in ended.stdout
