"""`kvpath export`, and the commands that take an exported directory."""

import json
from pathlib import Path

import pytest
import torch

import kvpath
from tests.cli.test_errors import refused
from tests.inference.test_load import RUN
from tests.runs import kvpath as command
from tests.runs import metrics_of


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of the trained run."""
    path = tmp_path_factory.mktemp("exported") / "deep" / "model"
    assert command("export", "--ckpt_path", trained, "--output", path) == 0
    return path


def test_an_export_is_the_run(trained: Path, exported: Path) -> None:
    assert {path.name for path in exported.iterdir()} == {"model.safetensors", "config.json", "tokenizer.json"}
    ours, theirs = kvpath.load(exported), kvpath.load(trained)
    tokens = torch.arange(0, 40)[None]
    with torch.no_grad():
        assert torch.equal(ours.model(tokens), theirs.model(tokens))
    assert ours.tokenizer is not None
    assert theirs.tokenizer is not None
    assert ours.tokenizer.fingerprint == theirs.tokenizer.fingerprint
    stored = json.loads((exported / "config.json").read_text())
    assert (stored["format_version"], stored["step"]) == (1, 6)


def test_bf16(exported: Path, tmp_path: Path) -> None:
    assert command("export", "--ckpt_path", exported, "--output", tmp_path / "half", "--dtype", "bf16") == 0
    half, whole = (kvpath.load(path).model.state_dict() for path in (tmp_path / "half", exported))
    assert all(torch.equal(value, whole[name].bfloat16()) for name, value in half.items())
    sizes = [(path / "model.safetensors").stat().st_size for path in (tmp_path / "half", exported)]
    assert sizes[0] < 0.6 * sizes[1]


def test_an_export_is_evaluated_as_its_run_is(trained: Path, exported: Path, tmp_path: Path) -> None:
    entries = []
    for path in (trained, exported):
        out = tmp_path / f"{path.name}.json"
        assert command("test", "--ckpt_path", path, "--output", out) == 0
        (entry,) = json.loads(out.read_text())
        entries.append({key: value for key, value in entry.items() if key != "run"})
    assert entries[0] == entries[1]
    assert entries[0]["format_version"] == 1


def test_an_export_is_validated_and_predicted_on(exported: Path, trained: Path, tmp_path: Path) -> None:
    assert command("validate", "--ckpt_path", exported) == 0
    for path in (trained, exported):
        assert command("predict", "--ckpt_path", path, "--output", tmp_path / path.name) == 0
    assert (tmp_path / trained.name).read_text() == (tmp_path / exported.name).read_text()


def test_training_starts_from_an_export(toy: Path, trained: Path, exported: Path, tmp_path: Path) -> None:
    flags = ["--trainer.max_steps", "1", "--data.start_tokens", "0"]
    for path in (trained, exported):
        assert command("fit", "-c", toy, "--run", tmp_path / path.name, "--init_from", path, *flags) == 0
    assert metrics_of(tmp_path / trained.name) == metrics_of(tmp_path / exported.name)


def test_training_does_not_resume_from_an_export(
    toy: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, "fit", "-c", toy, "--run", tmp_path / "run", "--ckpt_path", exported)
    assert "an export has weights and no optimizer state; --init_from starts from it" in error


def test_a_checkpoint_without_a_run_has_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lone = tmp_path / "lone.ckpt"
    lone.write_bytes((RUN / "checkpoints" / "last.ckpt").read_bytes())
    assert command("export", "--ckpt_path", lone, "--output", tmp_path / "without") == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'without'}\n"
    assert "there is no tokenizer beside these weights; --tokenizer names one" in err
    tokenizer = RUN / "tokenizer.json"
    assert command("export", "--ckpt_path", lone, "--output", tmp_path / "with", "--tokenizer", tokenizer) == 0
    assert kvpath.load(tmp_path / "with").generate("owl", max_new_tokens=2)[0].stop_reason == "length"


def test_mistakes_are_one_line(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "it exists already" in refused(capsys, "export", "--ckpt_path", RUN, "--output", exported)
    assert "no weights in this" in refused(capsys, "export", "--ckpt_path", tmp_path, "--output", tmp_path / "out")
    assert "dtype must be one of" in refused(
        capsys, "export", "--ckpt_path", RUN, "--output", tmp_path / "out", "--dtype", "int4"
    )
    assert "required: --output" in refused(capsys, "export", "--ckpt_path", RUN)
