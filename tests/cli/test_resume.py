"""A run that stopped goes on as if it had not."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kvpath.cli.resume import refuse_changes
from kvpath.data import Budget, Files, PackedText, TokenizerConfig
from kvpath.errors import UserError
from tests.cli.test_fit import curves
from tests.runs import kvpath, metrics_of, toy_config, write_config

CHECKOUT = Path(__file__).parent.parent.parent


def state(run: Path) -> dict[str, Any]:
    stored: dict[str, Any] = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    return stored


def assert_equal_runs(one: Path, other: Path) -> None:
    assert metrics_of(one) == metrics_of(other)
    a, b = state(one), state(other)
    assert a["global_step"] == b["global_step"]
    assert a["state_dict"].keys() == b["state_dict"].keys()
    for name, value in a["state_dict"].items():
        assert torch.equal(value, b["state_dict"][name]), name
    (moments,), (others,) = (stored["optimizer_states"] for stored in (a, b))
    for index, of_parameter in moments["state"].items():
        for name, value in of_parameter.items():
            assert torch.equal(value, others["state"][index][name]), (index, name)
    samples = [(run / "samples.jsonl").read_text() for run in (one, other)]
    assert samples[0] == samples[1]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps, validation after every third."""
    return write_config(tmp_path_factory.mktemp("resume"), data__budget__tokens=12 * 64)


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert kvpath("fit", "-c", config, "--run", run) == 0
    return run


# Validations fall on steps 3, 6, 9, 12: saves fall on some of them, or between them.
@pytest.mark.parametrize("stop", [6, 7])
def test_two_halves_are_a_whole(config: Path, whole: Path, tmp_path: Path, stop: int) -> None:
    run = tmp_path / "run"
    assert kvpath("fit", "-c", config, "--run", run, "--trainer.max_steps", str(stop)) == 0
    assert state(run)["global_step"] == stop
    assert kvpath("fit", "-c", config, "--run", run, "--trainer.max_steps=-1", "--ckpt_path", "last") == 0
    if stop == 6:
        assert_equal_runs(run, whole)
    else:  # the first half ends with a validation of its own
        assert [line for line in metrics_of(run) if line["step"] != 7 or "train/loss" in line] == metrics_of(whole)


class Killed(Exception):
    """Stands for a kill: nothing that Lightning does at the end of a run happens."""


@pytest.mark.parametrize("save", [2, 3])
@pytest.mark.parametrize("killed_after", [7, 9])
def test_a_killed_run_goes_on_from_its_last_checkpoint(
    config: Path, whole: Path, tmp_path: Path, save: int, killed_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpath.training.watch import Watch

    run, flags = tmp_path / "run", ["--every.save", f"{save} steps"]
    log = Watch.on_train_batch_end

    def kill(self: Watch, trainer: Any, *arguments: Any) -> None:
        log(self, trainer, *arguments)
        if trainer.global_step == killed_after:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Watch, "on_train_batch_end", kill)
        with pytest.raises(Killed):
            kvpath("fit", "-c", config, "--run", run, *flags)
    assert state(run)["global_step"] == (killed_after - 1) // save * save
    assert metrics_of(run)[-1]["step"] == killed_after
    assert kvpath("fit", "-c", config, "--run", run, *flags, "--ckpt_path", "last") == 0
    assert_equal_runs(run, whole)
    assert len(json.loads((run / "env.json").read_text())) == 2
    ours, theirs = curves(run), curves(whole)
    assert ours.Tags()["scalars"] == theirs.Tags()["scalars"]
    for tag in ("train/loss", "train/loss_by_tokens", "validation/loss"):
        assert [(p.step, p.value) for p in ours.Scalars(tag)] == [(p.step, p.value) for p in theirs.Scalars(tag)]
    assert [p.step for p in ours.Tensors("sample/text_summary")] == [3, 6, 9, 12]


def test_a_finished_run_stays_as_it_is(config: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    assert kvpath("fit", "-c", config, "--run", run, "--ckpt_path", "last") == 0
    assert_equal_runs(run, whole)
    metrics = [json.loads((path / "summary.json").read_text())["metrics"] for path in (run, whole)]
    assert metrics[0] == metrics[1]


def test_last_without_a_checkpoint_starts_and_says_so(
    toy: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(trained / "config.yaml", run)
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n{"step": 2, "tra')
    assert kvpath("fit", "-c", toy, "--run", run, "--ckpt_path", "last") == 0
    assert f"no checkpoint in {run} yet: starting from step 0" in capsys.readouterr().err
    assert metrics_of(run) == metrics_of(trained)


def test_last_of_a_run_that_is_not_there_wants_a_piece(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvpath("fit", "--run", tmp_path / "run", "--ckpt_path", "last") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"there is no run in {tmp_path / 'run'} to go on with, nor a -c PIECE to begin one with" in line


def test_resuming_says_from_where(toy: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    assert kvpath("fit", "--run", run, "--ckpt_path", "last") == 0  # the stored configuration is enough
    assert f"resuming from {run}/checkpoints/last.ckpt, step 6" in capsys.readouterr().err
    assert kvpath("fit", "-c", toy, "--run", tmp_path / "other", "--ckpt_path", tmp_path / "nowhere") == 2
    assert "there is no such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "kind", "key"),
    [
        ("--model.backbone.norm_eps=1e-4", "model", "model.backbone.norm_eps"),
        ("--model.seed=5", "model", "model.seed"),
        ("--data.seed=5", "data", "data.seed"),
        ("--data.holdout_every=6", "data", "data.holdout_every"),
        ("--data.budget.tokens=512", "horizon", "data.budget.tokens"),
        ("--model.optimizer.warmup_steps=0", "horizon", "model.optimizer.warmup_steps"),
    ],
)
def test_a_changed_run_is_refused_by_name_and_allowed_by_name(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, kind: str, key: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    before = (run / "metrics.jsonl").read_text()
    assert kvpath("fit", "--run", run, "--ckpt_path", "last", flag) == 2
    error = capsys.readouterr().err
    assert f"changed since the run began: {key}: " in error
    assert f"that changes the {kind} of a run; --allow '[{kind}]' allows it" in error
    assert (run / "metrics.jsonl").read_text() == before
    assert kvpath("fit", "--run", run, "--ckpt_path", "last", flag, "--allow", f"[{kind}]") == 0
    assert f"changed since the run began: {key}: " in capsys.readouterr().err


def test_fields_that_a_run_did_not_know_yet_had_their_defaults(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    values = yaml.safe_load((run / "config.yaml").read_text())
    for key in ("lanes", "packing", "document_masking", "shuffle_block"):
        del values["data"][key]
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    capsys.readouterr()
    assert kvpath("fit", "--run", run, "--ckpt_path", "last") == 0
    assert "changed since" not in capsys.readouterr().err
    assert kvpath("fit", "--run", run, "--ckpt_path", "last", "--data.document_masking", "true") == 2
    assert "data.document_masking was False and is now True" in capsys.readouterr().err


def test_harmless_changes_are_listed(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    assert kvpath("fit", "--run", run, "--ckpt_path", "last", "--every.log", "2 steps") == 0
    assert "changed since the run began: every.log: 1 step -> 2 steps" in capsys.readouterr().err
    assert kvpath("fit", "--run", run, "--ckpt_path", "last", "--allow", "[everything]", "--data.seed=3") == 2
    assert "--allow must name some of model, data, horizon, got everything" in capsys.readouterr().err


def test_how_a_source_is_read_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    source = "data.source.init_args"
    refuse_changes({f"{source}.verify": (False, True), f"{source}.tries": (7, 20)}, [])
    assert f"changed since the run began: {source}.tries: 7 -> 20" in capsys.readouterr().err
    with pytest.raises(UserError, match="that changes the data of a run"):
        refuse_changes({f"{source}.text_field": ("text", "body")}, [])


def heed_ctrl_c() -> None:
    """What a shell starts in the background ignores it, and so does all that is started from there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def started(run: Path, config: Path, *flags: str) -> subprocess.Popen[str]:
    """The command as a process of its own, seen to have logged its second step."""
    command = [sys.executable, "-m", "kvpath", "fit", "-c", str(config), "--run", str(run), *flags]
    process = subprocess.Popen(
        command,
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    )
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < 2:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.02)
    return process


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """A run that does not end by itself before it is stopped."""
    steps = 20_000
    budget = {**toy_config(tmp_path)["data"]["budget"], "tokens": steps * 64}
    return write_config(tmp_path, data__budget=budget, every__save="1 step", every__validate="1000000 steps")


def test_killed_for_real(long: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = started(run, long)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    step = state(run)["global_step"]  # whole, whenever it was
    assert step >= 1
    assert kvpath("fit", "--run", run, "--ckpt_path", "last", "--trainer.max_steps", str(step + 2)) == 0
    steps = [line["step"] for line in metrics_of(run) if "train/loss" in line]
    assert steps == list(range(1, step + 3))


def test_ctrl_c_exits_with_130(long: Path, tmp_path: Path) -> None:
    process = started(tmp_path / "run", long)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert "Traceback" not in (process.stderr.read() if process.stderr else "")


def test_another_run_s_checkpoint_goes_on_in_a_new_directory_by_the_same_rules(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--ckpt_path", trained, "--data.budget.tokens=448")
    assert kvpath("fit", "--run", tmp_path / "new", *more) == 2
    assert "data.budget.tokens was 384 and is now 448" in capsys.readouterr().err
    assert kvpath("fit", "--run", tmp_path / "new", *more, "--allow", "[horizon]") == 0
    assert [line["step"] for line in metrics_of(tmp_path / "new") if "train/loss" in line] == [7]


def test_another_run_s_checkpoint_is_no_way_into_a_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    assert kvpath("fit", "--run", tmp_path / "run", "--ckpt_path", trained) == 2
    assert "is of another run than the one in" in capsys.readouterr().err


@pytest.fixture
def rewritten(tmp_path: Path) -> tuple[Path, Path]:
    """A run, and its corpus, whose text was changed after it."""
    toy = write_config(tmp_path)
    assert kvpath("fit", "-c", toy, "--run", tmp_path / "run") == 0
    corpus = tmp_path / "corpus.jsonl"
    texts = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]
    corpus.write_text("".join(json.dumps({"text": text[::-1].upper()}) + "\n" for text in texts), encoding="utf-8")
    return tmp_path / "run", toy


def test_text_that_changed_is_refused_by_name(rewritten: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = rewritten
    before = (run / "tokenizer.json").read_bytes()
    more = ("fit", "--run", run, "--ckpt_path", "last", "--data.budget.tokens=448", "--allow")
    assert kvpath(*more, "[horizon]") == 2
    assert "data.tokenizer 'train' is not the one that the checkpoint was trained with" in capsys.readouterr().err
    own = (f"--data.tokenizer.name={run / 'tokenizer.json'}", "--data.tokenizer.vocab_size=null")
    assert (run / "tokenizer.json").read_bytes() == before
    (run.parent / "corpus.jsonl").write_text('{"text": "key value path"}\n' * 60, encoding="utf-8")
    assert kvpath(*more, "[horizon]", *own) == 2  # listed as a change of the data
    capsys.readouterr()
    assert kvpath(*more, "[horizon, data]", *own) == 0


def test_weights_are_evaluated_with_the_tokenizer_of_their_run(
    rewritten: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run, toy = rewritten
    assert kvpath("test", "--ckpt_path", run) == 0
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    corpus = PackedText(
        Files(config["data"]["source"]["init_args"]["files"]),
        TokenizerConfig(str(run / "tokenizer.json")),
        seq_len=16,
        budget=Budget(64, global_batch_sequences=1),
        holdout_every=5,
    )
    corpus.setup("test")
    results = json.loads((run / "perplexity.json").read_text(encoding="utf-8"))
    assert [row["tokens"] for row in results] == [entry.n_tokens for entry in corpus.evaluations["test"]]
    capsys.readouterr()
    assert kvpath("test", "--ckpt_path", run, "-c", toy) == 2  # which asks for one of the text as it is now
    assert "is not the one that the checkpoint was trained with" in capsys.readouterr().err
