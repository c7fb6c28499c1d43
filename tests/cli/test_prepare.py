"""`kvpath prepare`, and runs on what it made: without a network, and never on what was held out."""

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

from tests.runs import kvpath, metrics_of, write_config


@pytest.fixture(scope="module")
def shards(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's data; only to be read."""
    directory = tmp_path_factory.mktemp("prepared") / "shards"
    assert kvpath("prepare", "-c", toy, "--output", directory, "--workers=1") == 0
    return directory


def prepared(directory: Path) -> list[str]:
    return ["--data.source=Prepared", f"--data.source.directory={directory}"]


def refused(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    assert kvpath(*argv) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_it_says_what_it_made(toy: Path, shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvpath("prepare", "-c", toy, "--output", shards) == 0  # all is there
    out = capsys.readouterr().out
    total = json.loads((shards / "manifest.json").read_text())["total"]
    assert f"train: {total['train']['documents']} documents, {total['train']['tokens']:,} tokens" in out
    assert {name: n["documents"] for name, n in total.items()} == {"train": 24, "validation": 8, "test": 8}
    assert kvpath("prepare", "--verify", shards) == 0
    assert "all 1 shards are as they were written" in capsys.readouterr().out


def test_a_run_on_shards_opens_no_connection_and_equals_the_run_on_text(
    toy: Path, trained: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*arguments: object) -> NoReturn:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "socket", connect)
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    run = tmp_path / "run"
    assert kvpath("fit", "-c", toy, *prepared(shards), "--data.tokenizer.vocab_size=null", "--run", run) == 0
    assert metrics_of(run) == metrics_of(trained)
    assert kvpath("test", "--ckpt_path", run) == 0
    assert (run / "perplexity.json").exists()


def test_the_name_of_a_hub_tokenizer_means_the_one_of_the_shards(
    toy: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvpath.data.tokenizer._download", lambda name: pytest.fail(f"{name} was asked for"))
    directory = tmp_path / "shards"
    directory.mkdir()
    for path in shards.iterdir():
        if path.suffix != ".json" or path.name == "tokenizer.json":
            os.symlink(path, directory / path.name)
    for name in ("plan.json", "manifest.json"):
        text = (shards / name).read_text().replace('"tokenizer_name": "train"', '"tokenizer_name": "someone/some"')
        (directory / name).write_text(text)
    named = ["--data.tokenizer.name=someone/some", "--data.tokenizer.vocab_size=null"]
    assert kvpath("fit", "-c", toy, *prepared(directory), *named, "--run", tmp_path / "run") == 0


def test_what_contradicts_the_shards_is_refused(
    toy: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["fit", "-c", toy, *prepared(shards), "--run", tmp_path / "run"]
    assert "data.holdout_every is 4, but" in refused(capsys, *run, "--data.holdout_every=4")
    other = tmp_path / "other"
    assert kvpath("prepare", "-c", toy, "--data.tokenizer.vocab_size=290", "--output", other, "--workers=1") == 0
    message = refused(
        capsys, *run, f"--data.tokenizer.name={other / 'tokenizer.json'}", "--data.tokenizer.vocab_size=null"
    )
    assert "data.tokenizer is not the one that" in message
    stream = ["--data.stream=true", "--data.eval_limit_tokens=20", f"--data.tokenizer.name={shards / 'tokenizer.json'}"]
    assert "holds tokens, not text" in refused(capsys, *run, *stream, "--data.tokenizer.vocab_size=null")


@pytest.mark.parametrize("damage", ["none", "missing", "cut off", "a bit flipped"])
def test_a_damaged_shard_is_named_with_its_checksum(
    toy: Path, shards: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "shards"
    shutil.copytree(shards, directory)
    path = directory / "train" / "00000-0000.tokens"
    if damage == "missing":
        path.unlink()
    elif damage == "cut off":
        os.truncate(path, 100)
    elif damage == "a bit flipped":
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
    fit = ["fit", "-c", toy, *prepared(directory), "--data.tokenizer.vocab_size=null", "--trainer.fast_dev_run=1"]
    verified = [*fit, "--data.source.verify=true"]
    if damage == "none":
        assert kvpath(*verified) == 0
        return
    messages = [refused(capsys, *verified)]
    if damage == "a bit flipped":
        assert kvpath(*fit) == 0  # the size alone does not tell
    else:
        messages.append(refused(capsys, *fit))
    (shard,) = json.loads((directory / "manifest.json").read_text())["shards"]
    for message in messages:
        assert str(path) in message
        assert shard["regions"]["train"]["sha256"]["tokens"] in message
        assert message.endswith("and the same `kvpath prepare` makes it again")


def test_a_run_is_not_evaluated_on_documents_that_it_may_have_trained_on(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("validate", "test"):
        message = refused(capsys, command, "--ckpt_path", trained, "--data.holdout_every=4", "--output", tmp_path / "x")
        assert "data.holdout_every was 5 when the weights were trained and is 4: that would score documents" in message
        limited = ["--data.holdout_every=4", "--data.source.max_documents=30"]
        assert "that would score" in refused(capsys, command, "--ckpt_path", trained, *limited)


def test_a_run_on_shards_is_evaluated_on_texts_and_not_on_those_that_it_may_have_trained_on(
    toy: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, run = tmp_path / "shards", tmp_path / "run"
    shutil.copytree(shards, directory)
    argv = ["-c", toy, *prepared(directory), "--data.tokenizer.vocab_size=null", "--run", run]
    assert kvpath("fit", *argv) == 0

    def piece(source: dict[str, Any], holdout_every: int | None) -> Path:
        path = tmp_path / "piece.yaml"
        text = {"source": source, "holdout_every": holdout_every}
        path.write_text(yaml.safe_dump({"data": {"evaluate": {"mine": text}}}))
        return path

    corpus = yaml.safe_load(toy.read_text())["data"]["source"]
    made = {"class_path": "Prepared", "init_args": {"directory": str(directory)}}
    test = ["test", "--ckpt_path", run, "-c"]
    for source, every in ((made, None), (made, 5), (corpus, 5)):
        assert kvpath(*test, piece(source, every)) == 0
    entries = json.loads((run / "perplexity.json").read_text())
    assert len(entries) == 1  # the same tokens, however they are kept
    message = refused(capsys, *test, piece(corpus, 4))
    assert f"was 5 when the weights were trained and is 4: that would score documents of {directory}" in message
    shutil.rmtree(directory)
    assert kvpath(*test, piece(corpus, 5)) == 0


def test_a_dry_run_writes_nothing(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvpath("prepare", "-c", toy, "--output", tmp_path / "shards", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "by 40 documents of 1 parts" in out
    assert "about 40 documents" in out
    assert list(tmp_path.iterdir()) == []


def test_jobs_say_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy, directory = write_config(tmp_path), tmp_path / "shards"
    (tmp_path / "more.jsonl").write_text('{"text": "more"}\n')
    files = f'--data.source.files=["{tmp_path}/*.jsonl"]'
    argv = ["prepare", "-c", toy, files, "--output", directory, "--workers=1"]
    assert kvpath(*argv, "--job=2/2") == 0
    assert "job 2/2 is done; " in capsys.readouterr().out
    assert kvpath(*argv, "--job=1/2") == 0
    assert "as 2 shards of uint16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "kvpath prepare needs pieces"),
        (["-c", "{toy}"], "kvpath prepare needs --output DIRECTORY, or --dry-run"),
        (["-c", "{toy}", "--output=x", "--job=3/2"], "--job must be J/N"),
        (["-c", "{toy}", "--output=x", "--workers=0"], "--workers must be at least 1, got 0"),
        (["-c", "{toy}", "--output=x", "--data.max_tokens=0"], "max_tokens must be at least 1, got 0"),
        (["-c", "{toy}", "--output=x", "--data.sauce=1"], "did you mean data.source"),
        (["--verify", "nowhere"], "nowhere holds no prepared shards, since it has no manifest.json: `kvpath prepare"),
        (["--verify", "x", "-c", "{toy}"], "--verify takes a DIRECTORY and no other option"),
    ],
)
def test_mistakes_are_one_line(
    toy: Path,
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, "prepare", *(argument.format(toy=toy) for argument in argv))


def test_a_limit_in_tokens_ends_the_training_data(
    toy: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limited = ["--data.max_tokens=200", "--data.repeat=false"]
    for name, source in {"text": [], "shards": prepared(shards)}.items():
        message = refused(capsys, "fit", "-c", toy, *source, *limited, "--run", tmp_path / name)
        assert "ends before data.budget.tokens 384" in message
        epoch: Any = message.partition("an epoch has ")[2].split(",")[0]
        assert 100 < int(epoch) <= 200
