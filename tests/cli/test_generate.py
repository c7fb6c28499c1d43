"""`kvpath generate`: text on standard output, all else on standard error."""

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import kvpath
from tests.cli.test_errors import refused
from tests.inference.test_load import RUN
from tests.runs import kvpath as command

EXPORT = RUN.parent / "exported"
SAMPLING = ["--max_new_tokens", "6", "--temperature", "1.0", "--seed", "5"]


def expected(prompts: list[str], **more: Any) -> list[str]:
    results = kvpath.load(RUN).generate(prompts, **{"max_new_tokens": 6, "temperature": 1.0, "seed": 5, **more})
    return [result.text for result in results]


@pytest.mark.parametrize("stream", [[], ["--stream"], ["--no-stream"]], ids=["default", "stream", "no-stream"])
@pytest.mark.parametrize("path", [RUN, RUN / "checkpoints" / "last.ckpt", EXPORT], ids=["run", "file", "export"])
def test_the_text_alone_is_on_standard_output(
    path: Path, stream: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("generate", "--ckpt_path", path, "--prompt", "owl", *SAMPLING, *stream) == 0
    out, err = capsys.readouterr()
    assert out == expected(["owl"])[0] + "\n"
    assert err.startswith("6 tokens in ")
    assert err.endswith(" tokens/s\n")


@pytest.mark.parametrize("flags", [[], ["--stream"], ["--batch_size", "2"]], ids=["at-once", "stream", "batches"])
def test_several_rows_come_in_order(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["--prompt", "owl", "--prompt", "key value"]
    assert command("generate", "--ckpt_path", RUN, *prompts, "--n", "2", *SAMPLING, "--dtype", "fp64", *flags) == 0
    out, err = capsys.readouterr()
    texts = [r.text for r in kvpath.load(RUN, dtype="fp64").generate(
        ["owl", "key value"], n=2, max_new_tokens=6, temperature=1.0, seed=5
    )]  # fmt: skip
    assert out == "".join(text + "\n" for text in texts)
    assert [line for line in err.splitlines() if line.startswith("--")] == [
        f"-- sample {sample} of {prompt!r}: length" for prompt in ("owl", "key value") for sample in range(2)
    ]


def test_jsonl_has_prompt_text_tokens_and_stop_reason(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["--prompt", "owl", "--prompt", "naïve"]
    assert command("generate", "--ckpt_path", RUN, *prompts, "--format", "jsonl", *SAMPLING) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["owl", "naïve"]
    assert [line["text"] for line in lines] == expected(["owl", "naïve"])
    assert all(len(line["tokens"]) == 6 and line["stop_reason"] == "length" for line in lines)


def test_every_option_reaches_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--top_k 20 --top_p 0.9 --min_p 0.05 --repetition_penalty 1.3 --n 1 --device cpu --dtype fp64".split()
    assert command("generate", "--ckpt_path", RUN, "--prompt", "owl", *SAMPLING, *flags, "--stop", "e", "a b") == 0
    (result,) = kvpath.load(RUN, dtype="fp64").generate(
        "owl", max_new_tokens=6, temperature=1.0, seed=5, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.3,
        stop=["e", "a b"],
    )  # fmt: skip
    assert capsys.readouterr().out == result.text + "\n"


def test_a_prompt_file_is_a_prompt_or_one_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt.txt").write_text("the owl\nand key\n", encoding="utf-8")
    assert command("generate", "--ckpt_path", RUN, "--prompt_file", tmp_path / "prompt.txt", *SAMPLING) == 0
    assert capsys.readouterr().out == expected(["the owl\nand key"])[0] + "\n"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "owl"}\n{"prompt": "naïve"}\n', encoding="utf-8")
    assert command("generate", "--ckpt_path", RUN, "--prompt_file", tmp_path / "prompts.jsonl", *SAMPLING) == 0
    assert capsys.readouterr().out == "".join(text + "\n" for text in expected(["owl", "naïve"]))


def test_interactive_continues_each_line_and_survives_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("owl\n\nowl"))
    assert command("generate", "--ckpt_path", RUN, "--interactive", *SAMPLING) == 0
    out, err = capsys.readouterr()
    assert out == expected(["owl"])[0] + "\n" + expected(["owl"], seed=7)[0] + "\n"
    assert err.count("> ") == 4
    assert "kvpath: error: prompt 0 is empty" in err


def test_a_context_longer_than_trained_for_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", "owl", "--max_new_tokens", "70", "--temperature", "1.5"]
    assert command("generate", "--ckpt_path", RUN, *flags, "--format", "jsonl") == 0
    out, err = capsys.readouterr()
    assert "more than the max_seq_len=64 that the model is trained for" in err
    assert json.loads(out)["prompt"] == "owl"


def test_a_reader_that_has_enough_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody_reads:
        monkeypatch.setattr(sys, "stdout", nobody_reads)
        assert command("generate", "--ckpt_path", RUN, "--prompt", "owl", *SAMPLING) == 0
    assert "error" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", ""], "prompt 0 is empty: it must hold at least one token"),
        ([], "one of the arguments --prompt --prompt_file --interactive is required"),
        (["--prompt", "a", "--interactive"], "not allowed with argument"),
        (["--prompt", "a", "--top_k", "many"], "argument --top_k: invalid int value: 'many'"),
        (["--prompt", "a", "--top_p", "2"], "top_p must be above 0 and at most 1, got 2.0"),
        (["--prompt", "a", "--temp", "1"], "unrecognized arguments: --temp 1"),
        (["--prompt", "a", "--dtype", "int8"], "dtype must be one of fp32, bf16, fp16, fp64, got int8"),
        (["--prompt", "a", "--device", "nowhere"], "device nowhere is not to be had"),
        (["--prompt", "a", "--batch_size", "0"], "batch_size must be positive, got 0"),
        (["--prompt", "a", "--stream", "--format", "jsonl"], "--stream is for --format text"),
        (["--prompt", "a", "--stream", "--batch_size", "2"], "--stream runs one row after the other"),
        (["--interactive", "--no-stream"], "--interactive streams text"),
        (["--prompt_file", "no/such/file"], "prompt_file no/such/file cannot be read"),
        (["--prompt", "a", "--tokenizer", "no/such.json"], "no/such.json cannot be read"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, "generate", "--ckpt_path", RUN, *flags)


def test_files_that_are_no_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin").write_bytes("naïve".encode("latin-1"))
    assert "cannot be read" in refused(capsys, "generate", "--ckpt_path", RUN, "--prompt_file", tmp_path / "latin")
    for line in ("owl", '{"text": "owl"}', '{"prompt": 3}', "[]"):
        (tmp_path / "odd.jsonl").write_text('{"prompt": "owl"}\n' + line + "\n")
        error = refused(capsys, "generate", "--ckpt_path", RUN, "--prompt_file", tmp_path / "odd.jsonl")
        assert 'odd.jsonl, line 2: must be an object with a text "prompt", got ' in error


def test_there_are_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no weights in this directory" in refused(capsys, "generate", "--ckpt_path", tmp_path, "--prompt", "a")


def test_a_run_without_a_tokenizer_rebuilds_it_from_its_data(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "tokenizer.json").unlink()
    rebuilt, kept = kvpath.load(tmp_path / "run").tokenizer, kvpath.load(trained).tokenizer
    assert rebuilt is not None
    assert kept is not None
    assert rebuilt.fingerprint == kept.fingerprint


def test_a_batch_too_large_for_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kvpath.inference.memory.free_bytes", lambda device: 1000)
    error = refused(capsys, "generate", "--ckpt_path", RUN, "--prompt", "owl", "--n", "3")
    assert "a cache of 3 rows x " in error
    assert "cpu has 1,000 bytes free" in error
