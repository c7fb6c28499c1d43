"""The stages of a study, in order: what is done is skipped, what was killed goes on, what fails stops it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpath import pieces
from kvpath.cli.main import COMMANDS
from kvpath.cli.series import series
from kvpath.errors import UserError
from kvpath.series import worker as module
from kvpath.series.jobs import Job, jobs_of
from kvpath.series.search import finished
from kvpath.series.study import Study
from tests.runs import kvpath, metrics_of, write_config


def write_series(folder: Path, **changes: Any) -> Path:
    """Two stages of one configuration."""
    values = {
        "run": str(folder / "study"),
        "pieces": [str(write_config(folder, data__shuffle_block=64))],
        "stages": [{"name": "short", "pieces": []}, {"name": "long", "pieces": [str(longer(folder))]}],
    }
    path = folder / "series.yaml"
    path.write_text(yaml.safe_dump({**values, **changes}), encoding="utf-8")
    return path


def longer(folder: Path) -> Path:
    path = folder / "longer.yaml"
    path.write_text("data: {seq_len: 32, budget: {tokens: 192, global_batch_sequences: 2}}\n", encoding="utf-8")
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that a series starts, none of which is run: each succeeds and reaches its last step."""
    started: list[list[str]] = []

    def run(self: module.Workers, job: Job, command: list[str], devices: str | None) -> tuple[int, str]:
        started.append(command)
        finish(job.directory)
        return 0, ""

    monkeypatch.setattr(module.Workers, "_run", run)
    return started


def finish(run: Path, step: int = 6, planned: int = 6) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "summary.json").write_text(json.dumps({"step": step, "planned_steps": planned}), encoding="utf-8")


def test_stages_start_in_order_each_from_the_one_before(tmp_path: Path, started: list[list[str]]) -> None:
    assert series(["run", str(write_series(tmp_path)), "--trainer.devices", "1", "--model.seed=3"]) == 0
    base, study = tmp_path / "toy.yaml", tmp_path / "study"
    overrides = ["--trainer.devices", "1", "--model.seed=3"]
    assert started == [
        ["fit", f"-c={base}", f"--run={study / 'short'}", "--ckpt_path=last", *overrides],
        [
            *("fit", f"-c={base}", f"-c={longer(tmp_path)}", f"--run={study / 'long'}"),
            *("--ckpt_path=last", f"--init_from={study / 'short'}", *overrides),
        ],
    ]


def test_what_is_done_is_skipped_and_what_is_not_is_run(
    tmp_path: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_series(tmp_path)
    finish(tmp_path / "study" / "short")
    finish(tmp_path / "study" / "long", step=3)
    assert series(["run", str(file)]) == 0
    assert [command[3] for command in started] == [f"--run={tmp_path / 'study' / 'long'}"]
    assert f"--init_from={tmp_path / 'study' / 'short'}" in started[0]
    assert capsys.readouterr().err == f"{tmp_path / 'study' / 'short'}: done\n"
    finish(tmp_path / "study" / "long")
    assert series(["run", str(file)]) == 0
    assert len(started) == 1


def test_done_is_the_last_step_of_the_budget(tmp_path: Path) -> None:
    assert not finished(tmp_path)
    finish(tmp_path, step=5)
    assert not finished(tmp_path)
    finish(tmp_path, step=6)
    assert finished(tmp_path)


@pytest.mark.parametrize(("code", "passed_on"), [(2, 2), (75, 75), (130, 130), (-signal.SIGKILL, 137)])
def test_a_stage_that_fails_ends_the_series_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, passed_on: int
) -> None:
    started: list[list[str]] = []

    class Ended(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **_: Any) -> None:
            started.append(command)
            super().__init__(["sh", "-c", f"exit {code}" if code >= 0 else f"kill {code} $$"])

    monkeypatch.setattr(module.subprocess, "Popen", Ended)
    assert series(["run", str(write_series(tmp_path))]) == passed_on
    assert len(started) == 1
    assert capsys.readouterr().err == f"{tmp_path / 'study' / 'short'}: ended with exit code {passed_on}\n"


def test_no_stage_starts_from_one_that_was_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    def run(self: module.Workers, job: Job, command: list[str], devices: str | None) -> tuple[int, str]:
        started.append(command)
        finish(tmp_path / "study" / "short", step=3)  # as max_time may end it
        return 0, ""

    monkeypatch.setattr(module.Workers, "_run", run)
    assert series(["run", str(write_series(tmp_path))]) == 75
    assert len(started) == 1
    assert "short: ended before the last step of its budget" in capsys.readouterr().err


def test_plan_prints_commands_that_a_shell_reads(
    tmp_path: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a folder").mkdir()
    file = write_series(tmp_path / "a folder")
    finish(tmp_path / "a folder" / "study" / "short")
    assert series(["plan", str(file), "--allow", "[data]"]) == 0
    printed = commands(capsys.readouterr().out)
    assert started == []
    (tmp_path / "a folder" / "study" / "short" / "summary.json").unlink()
    series(["run", str(file), "--allow", "[data]"])
    assert printed == [["kvpath", *command] for command in started]


def commands(script: str) -> list[list[str]]:
    """What a shell would run of a plan, whose other lines are remarks."""
    return [shlex.split(line) for line in script.splitlines() if not line.startswith("# ")]


def test_a_missing_piece_is_found_before_anything_is_run(tmp_path: Path, started: list[list[str]]) -> None:
    stages = [{"name": "short", "pieces": []}, {"name": "long", "pieces": ["stage/2kk"]}]
    with pytest.raises(UserError, match="'stage/2kk': did you mean stage/2k"):
        series(["run", str(write_series(tmp_path, stages=stages))])
    assert started == []


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("[1, 2]", ["must hold run, pieces and stages, got list"]),
        ("{run: r, stages: [", ["while parsing"]),
        ("{stages: [{name: a, pieces: []}]}", ["run must be a directory, got None"]),
        (
            "{run: r, pieces: p, stages: []}",
            ["pieces must be a list of pieces, got 'p'", "stages must be a list of at"],
        ),
        ("{run: r, stages: {a: b}}", ["stages must be a list of at least one stage, got {'a': 'b'}"]),
        (
            "{run: r, stages: [{name: a}, 3]}",
            [r"stages\[0\] must have a name and pieces", r"stages\[1\] must have .* 3"],
        ),
        ("{run: r, stages: [{name: [a], pieces: []}]}", [r"stages\[0\] must have a name"]),
        ("{run: r, stages: [{name: a, pieces: [1]}]}", [r"stages\[0\].pieces must be a list of pieces, got \[1\]"]),
        (
            "{run: 3, step: 1, stages: [{name: a, pieces: [], seed: 1}, {name: a, pieces: []}]}",
            [
                "step is not a key; there are run, pieces, set, axes, only, except, stages, search, test",
                "run must be a directory, got 3",
                r"stages\[0\].seed is not a key; there are name, pieces, set",
                "stages must have different names, got a, a",
            ],
        ),
    ],
)
def test_mistakes_in_a_series_come_together_in_one_line(tmp_path: Path, text: str, messages: list[str]) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=".*; .*".join(f"series {file}: .*{message}" for message in messages)) as raised:
        Study.read(file)
    assert "\n" not in str(raised.value)


def test_a_series_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="series .*nowhere.yaml: .*No such file"):
        Study.read(tmp_path / "nowhere.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"run: \xe9")
    with pytest.raises(UserError, match="series .*latin.yaml: .*can't decode"):
        Study.read(tmp_path / "latin.yaml")


AXES = {"layout": {"a": None, "b": None}}
SEARCH = {"set": "model.optimizer.learning_rate", "values": [0.01, 0.02]}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "FILE", "--workers", "0"], "--workers must be positive, got 0"),
        (["run", "FILE", "--minutes", "-1"], "--minutes must be positive, got -1.0"),
        (["plan", "FILE", "--tokens_per_second", "0"], "tokens_per_second must be positive and finite, got 0.0"),
        (["chosen", "FILE", "c"], "c is not a value of layout; there are a, b"),
        (["chosen", "FILE", "a"], "the search for a is not decided"),
        (["chosen", "FILE"], "the following arguments are required: value"),
        (["stop", "FILE"], "invalid choice: 'stop'"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_series(tmp_path, axes=AXES, search=SEARCH)
    assert kvpath("series", *(str(file) if word == "FILE" else word for word in argv)) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_chosen_and_status_print_what_they_are_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_series(tmp_path, axes=AXES, search=SEARCH)
    for value, loss in ((0.01, 3.0), (0.02, 2.0)):
        run = tmp_path / "study" / "search" / f"a-learning_rate{value}" / "short"
        finish(run)
        summary = {"step": 6, "planned_steps": 6, "metrics": {"validation/loss": loss}}
        (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert kvpath("series", "chosen", file, "a") == 0
    assert capsys.readouterr().out == "0.02\n"
    assert kvpath("series", "status", file) == 0
    assert "8 runs and tests: 2 done, 3 to do, 3 waiting" in capsys.readouterr().out


SHIPPED = [name for name in pieces.available() if name.startswith("series/")]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_series_name_pieces_that_are_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert series(["plan", str(pieces.shipped(name))]) == 0
    assert len(commands(capsys.readouterr().out)) == len(jobs_of(Study.read(pieces.shipped(name))))


def test_series_is_a_command() -> None:
    assert SHIPPED
    assert "series" in COMMANDS


def test_a_killed_stage_goes_on_and_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    many = "{data: {seq_len: 32, budget: {tokens: 3840}}, every: {save: 1 steps, validate: 1000 steps}}"
    (tmp_path / "many.yaml").write_text(many, encoding="utf-8")
    stages = [{"name": "short", "pieces": []}, {"name": "long", "pieces": [str(tmp_path / "many.yaml")]}]
    file, study, whole = write_series(tmp_path, stages=stages), tmp_path / "study", tmp_path / "whole"
    pieces_given = ("-c", tmp_path / "toy.yaml", "-c", tmp_path / "many.yaml")
    assert kvpath("fit", "-c", tmp_path / "toy.yaml", "--run", study / "short") == 0
    assert kvpath("fit", *pieces_given, "--run", whole, "--init_from", study / "short") == 0

    command = [sys.executable, "-m", "kvpath", "series", "run", str(file)]
    run = study / "long"
    last = run / "checkpoints" / "last.ckpt"
    # In a process group of its own: the series and its stage are killed together.
    running = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    while not last.exists() and running.poll() is None:
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    assert last.exists()
    assert not finished(run)

    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{study / 'short'}: done" in again.stderr
    assert f"resuming from {last}, step " in again.stderr
    assert len(json.loads((run / "env.json").read_text(encoding="utf-8"))) == 2
    assert metrics_of(run) == metrics_of(whole)
    assert finished(run)


@pytest.mark.slow
def test_a_study_that_was_killed_goes_on_to_its_table(tmp_path: Path) -> None:
    """Two layouts, two seeds, two stages, a search and a test, by two workers, for real."""
    gqa = {"set": {"model.backbone.attention.init_args.n_kv_heads": 1}}
    values = {
        "axes": {
            "layout": {"gqa": gqa, "mha": {"set": {"model.backbone.attention.init_args.n_kv_heads": 2}}},
            "seed": {"set": ["model.seed", "data.seed"], "values": [1, 2]},
        },
        "search": {"set": "model.optimizer.learning_rate", "values": [1e-2, 1e-3], "axis": "layout"},
        "test": {"set": {"data.eval_contexts": [16, 32]}},
    }
    file = write_series(tmp_path, **values)
    study = tmp_path / "study"
    command = [sys.executable, "-m", "kvpath", "series", "run", str(file), "--workers", "2"]
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    begun = study / "gqa-seed1" / "short" / "checkpoints"
    while not begun.exists() and running.poll() is None:
        time.sleep(0.01)
    running.kill()  # and not its runs, which are told when it is gone
    assert running.wait() == -signal.SIGKILL
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    hashes = {}
    for layout in ("gqa", "mha"):
        assert (study / "search" / f"{layout}.json").is_file()
        for seed in (1, 2):
            run = study / f"{layout}-seed{seed}" / "long"
            summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
            hashes[layout, seed] = summary["stream_hash"]
            results = json.loads((run / "perplexity.json").read_text(encoding="utf-8"))
            assert {one["context"] for one in results} == {16, 32}
            assert (run / "log.txt").stat().st_size > 0
    assert hashes["gqa", 1] == hashes["mha", 1] != hashes["gqa", 2] == hashes["mha", 2]
    capsys = subprocess.run([*command[:4], "status", str(file)], capture_output=True, text=True, check=True)
    assert "16 runs and tests: 16 done" in capsys.stdout
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
