"""One run, one directory: what `kvpath fit` writes."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kvpath.training.stored_config import FORMAT_VERSION
from kvpath.training.watch import __doc__ as documented
from tests.runs import STEPS, TOKENS_PER_STEP, kvpath, metrics_of, write_config

TRAIN = {
    f"train/{name}"
    for name in "loss perplexity learning_rate gradient_norm tokens tokens_per_second mfu memory_gb".split()
}
IN_THE_FILE = TRAIN | {"data/stream_hash"}
"""What metrics.jsonl has of a step."""

VALIDATION = {"validation/loss", "validation/perplexity", "validation/bits_per_byte"}


def test_nothing_else_is_left_anywhere(trained: Path) -> None:
    assert [path.name for path in trained.parent.iterdir()] == ["run"]
    names = {path.name for path in trained.iterdir()}
    assert names == {
        "config.yaml",
        "env.json",
        "metrics.jsonl",
        "samples.jsonl",
        "summary.json",
        "tokenizer.json",
        "tb",
        "checkpoints",
    }
    assert {path.name for path in (trained / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt"}
    assert all(path.name.startswith("events.out") for path in (trained / "tb").iterdir() if path.suffix != ".yaml")


def test_metrics_have_the_documented_names(trained: Path) -> None:
    lines = metrics_of(trained, without=set())
    train = [line for line in lines if "train/loss" in line]
    validation = [line for line in lines if "validation/loss" in line]
    assert [line["step"] for line in train] == list(range(1, STEPS + 1))
    assert [line["step"] for line in validation] == [3, 6]
    assert all(line.keys() == {"step", *IN_THE_FILE} for line in train)
    assert all(line.keys() == {"step", *VALIDATION} for line in validation)
    assert documented is not None
    assert all(f"| {name} |" in documented for name in IN_THE_FILE)
    assert [line["train/tokens"] for line in train] == [step * TOKENS_PER_STEP for step in range(1, STEPS + 1)]
    assert train[-1]["train/loss"] < train[0]["train/loss"]
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["stream_hash"] == train[-1]["data/stream_hash"] != train[0]["data/stream_hash"]
    assert len(summary["stream_hash"]) == 16


def test_metrics_are_the_same_for_another_strategy_and_so_is_the_stream(
    toy: Path, trained: Path, tmp_path: Path
) -> None:
    concat = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "delta_dim": 2, "path_length": 2}
    attention = tmp_path / "concat.yaml"
    attention.write_text(
        yaml.safe_dump({"model": {"backbone": {"attention": {"class_path": "KVPathConcat", "init_args": concat}}}})
    )
    assert kvpath("fit", "-c", toy, "-c", attention, "--run", tmp_path / "run", "--trainer.max_steps", "3") == 0
    assert {name for line in metrics_of(tmp_path / "run", without=set()) for name in line} == {
        "step",
        *IN_THE_FILE,
        *VALIDATION,
    }
    ours, theirs = (
        [line["data/stream_hash"] for line in metrics_of(run) if "train/loss" in line]
        for run in (tmp_path / "run", trained)
    )
    assert ours == theirs[:3]


def curves(run: Path) -> EventAccumulator:
    events = EventAccumulator(str(run / "tb"))
    events.Reload()
    return events


def test_tensorboard_has_one_line_a_run(trained: Path) -> None:
    assert {path.parent for path in trained.rglob("events.out.tfevents.*")} == {trained / "tb"}
    events = curves(trained)
    assert set(events.Tags()["scalars"]) == {*TRAIN, "train/loss_by_tokens", *VALIDATION}
    assert [point.step for point in events.Scalars("train/loss")] == list(range(1, STEPS + 1))
    by_tokens = events.Scalars("train/loss_by_tokens")
    assert [point.step for point in by_tokens] == [step * TOKENS_PER_STEP for step in range(1, STEPS + 1)]
    assert [point.value for point in by_tokens] == [point.value for point in events.Scalars("train/loss")]
    assert [point.step for point in events.Scalars("validation/loss")] == [3, 6]
    assert [sample.step for sample in events.Tensors("sample/text_summary")] == [3, 6]
    hyper_parameters = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    for name in (b"model.backbone.d_model", b"model.optimizer.learning_rate", b"data.seq_len"):
        assert name in hyper_parameters
    for name in (b"ckpt_path", b"weights_only", b"data.start_tokens"):
        assert name not in hyper_parameters


def test_a_sample_stands_beside_each_validation(trained: Path) -> None:
    samples = [json.loads(line) for line in (trained / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [3, 6]
    assert all(isinstance(sample["text"], str) for sample in samples)


def test_summary_and_environment(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert (summary["name"], summary["step"], summary["planned_steps"]) == ("run", STEPS, STEPS)
    assert summary["tokens"] == STEPS * TOKENS_PER_STEP
    assert summary["metrics"]["validation/loss"] == metrics_of(trained)[-1]["validation/loss"]
    assert (trained / summary["checkpoint"]).is_file()
    (attempt,) = json.loads((trained / "env.json").read_text())
    assert attempt["packages"]["torch"]
    assert {"time", "command", "commit", "devices", "python"} <= attempt.keys()


def test_checkpoint_loads_without_running_code_and_says_its_version(trained: Path) -> None:
    stored = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)
    assert stored["kvpath"]["format_version"] == FORMAT_VERSION
    assert stored["global_step"] == STEPS
    assert stored["kvpath"]["backbone"]["attention"]["class_path"].endswith("GQA")


def test_the_saved_config_runs_again(trained: Path, tmp_path: Path) -> None:
    assert kvpath("fit", "-c", trained / "config.yaml", "--run", tmp_path / "again") == 0
    assert metrics_of(tmp_path / "again") == metrics_of(trained)
    assert (tmp_path / "again" / "config.yaml").read_text() == (trained / "config.yaml").read_text()


def test_print_config_prints_one_that_loads(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvpath("fit", "-c", toy, "--data.seed", "7", "--print_config") == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert yaml.safe_load(printed.read_text())["data"]["seed"] == 7
    assert kvpath("fit", "-c", printed, "--run", tmp_path / "run", "--trainer.fast_dev_run", "true") == 0


def test_match_is_stored_as_numbers(toy: Path, tmp_path: Path) -> None:
    flags = ["--model.backbone.d_ff=match", "--model.backbone.parameters=14160", "--trainer.max_steps=1"]
    assert kvpath("fit", "-c", toy, "--run", tmp_path / "run", *flags) == 0
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["backbone"]["d_ff"] == 24


def test_a_directory_that_holds_a_run_is_refused(toy: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    assert kvpath("fit", "-c", toy, "--run", trained) == 2
    assert "there is a run already; --ckpt_path last continues it" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


def test_fast_dev_run_writes_nothing(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert kvpath("fit", "-c", toy, "--run", "run", "--trainer.fast_dev_run", "true") == 0
    assert list(tmp_path.iterdir()) == []


def test_fast_dev_run_must_be_on_to_be_let_into_a_run(
    toy: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (trained / "metrics.jsonl").read_bytes()
    assert kvpath("fit", "-c", toy, "--run", trained, "--trainer.fast_dev_run=false") == 2
    assert "there is a run already" in capsys.readouterr().err
    assert (trained / "metrics.jsonl").read_bytes() == before


def test_a_piece_may_name_the_run(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "named.yaml").write_text("run: named\n", encoding="utf-8")
    assert kvpath("fit", "-c", toy, "-c", "named.yaml", "--trainer.max_steps=1") == 0
    assert (tmp_path / "named" / "summary.json").exists()
    assert not (tmp_path / "runs").exists()


def test_a_refused_start_is_no_run(toy: Path, tmp_path: Path) -> None:
    assert kvpath("fit", "-c", toy, "--run", tmp_path / "run", "--trainer.max_steps", "99") == 2
    assert kvpath("fit", "-c", toy, "--run", tmp_path / "run", "--trainer.max_steps", "1") == 0


def test_a_run_without_a_name_goes_under_runs(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert kvpath("fit", "-c", toy, "--trainer.max_steps", "1") == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "checkpoints" / "last.ckpt").is_file()


def test_every_counts_optimizer_steps_and_tokens(tmp_path: Path) -> None:
    config = write_config(tmp_path, every__log="128 tokens", every__validate="200 tokens")
    assert kvpath("fit", "-c", config, "--run", tmp_path / "run") == 0
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines if "train/loss" in line] == [2, 4, 6]
    assert [line["step"] for line in lines if "validation/loss" in line] == [4, 6]


def test_init_from_takes_weights_and_nothing_else(toy: Path, trained: Path, tmp_path: Path) -> None:
    assert kvpath("fit", "-c", toy, "--run", tmp_path / "run", "--init_from", trained) == 0
    (first, *_), last = metrics_of(tmp_path / "run"), metrics_of(trained)
    assert (first["step"], first["train/learning_rate"]) == (1, 0.01)
    assert first["train/loss"] < last[0]["train/loss"]
