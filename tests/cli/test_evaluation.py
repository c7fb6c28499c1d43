"""validate, test and predict on a trained run."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kvpath.data import PackedText
from kvpath.data.packing import Windows
from kvpath.model import Decoder
from tests.runs import kvpath, metrics_of
from tests.training.toys import toy_data


def results(path: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(path.read_text())
    return entries


@pytest.fixture(scope="module")
def region(toy: Path) -> tuple[PackedText, torch.Tensor]:
    """The data as the runs see it, and all tokens of the test region."""
    data = toy_data(toy.parent / "corpus.jsonl")
    data.setup("test")
    windows = data._evaluated.windows("test")[0]
    assert isinstance(windows, Windows)
    return data, torch.tensor(windows.tokens[: len(windows.tokens)].astype("int64"))


def brute_force(decoder: Decoder, tokens: torch.Tensor, context: int) -> tuple[float, int]:
    """Summed nats and number of scored tokens, one window after the other, in float64."""
    nll, scored = 0.0, 0
    for start in range(0, len(tokens) - 1, context):
        window = tokens[start : start + context + 1]
        with torch.no_grad():
            logits = decoder(window[None, :-1])[0]
        for logit, label in zip(logits, window[1:], strict=True):
            nll -= (logit - logit.logsumexp(0))[label].item()
            scored += 1
    return nll, scored


def test_perplexity_is_what_brute_force_finds(
    trained: Path,
    tmp_path: Path,
    region: tuple[PackedText, torch.Tensor],
    decoder: Decoder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, tokens = region
    out = tmp_path / "perplexity.json"
    flags = ["--data.eval_contexts=[16, 40]", "--data.eval_batch_tokens=100"]
    assert kvpath("test", "--ckpt_path", trained, "--output", out, *flags) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 3
    entries = results(out)
    assert [entry["context"] for entry in entries] == [16, 40]
    n_bytes = len(data.tokenizer.decode(tokens[1:].tolist()).encode())
    for entry, row in zip(entries, table[1:], strict=True):
        nll, scored = brute_force(decoder, tokens, entry["context"])
        assert entry["tokens"] == scored == len(tokens) - 1
        assert entry["bytes"] == n_bytes
        assert entry["nll_sum"] == pytest.approx(nll, rel=1e-6)
        assert entry["loss"] == pytest.approx(nll / scored, rel=1e-6)
        assert entry["perplexity"] == pytest.approx(math.exp(nll / scored), rel=1e-5)
        assert entry["bits_per_byte"] == pytest.approx(nll / math.log(2) / n_bytes, rel=1e-6)
        assert f"{entry['tokens']:,}" in row
        assert f"{entry['perplexity']:.3f}" in row
    assert entries[0]["nll_sum"] != entries[1]["nll_sum"]


def test_results_say_where_they_come_from(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "perplexity.json"
    assert kvpath("test", "--ckpt_path", trained, "--output", out) == 0
    (entry,) = results(out)
    said = {"format_version": 1, "run": "run", "step": 6, "seed": 0, "split": "test", "context": 16, "stride": 16}
    assert said.items() <= entry.items()
    assert entry["dtype"] == "32-true"
    assert entry["code_version"]


def test_repeating_replaces_and_other_settings_add(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "perplexity.json"
    for flags in ([], [], ["--data.eval_contexts=[8]"], ["--trainer.precision=64-true"], []):
        assert kvpath("test", "--ckpt_path", trained, "--output", out, *flags) == 0
    entries = results(out)
    assert sorted((entry["context"], entry["dtype"]) for entry in entries) == [
        (8, "32-true"),
        (16, "32-true"),
        (16, "64-true"),
    ]
    losses = {(entry["context"], entry["dtype"]): entry["loss"] for entry in entries}
    assert losses[16, "32-true"] == pytest.approx(losses[16, "64-true"], rel=1e-6)


def test_a_run_directory_a_file_in_it_and_a_lone_copy_are_the_same(trained: Path, toy: Path, tmp_path: Path) -> None:
    inside = trained / "checkpoints" / "last.ckpt"
    lone = tmp_path / "alone.ckpt"
    shutil.copy(inside, lone)
    data = tmp_path / "data.yaml"
    data.write_text(yaml.safe_dump({"data": yaml.safe_load(toy.read_text())["data"]}))
    found: list[tuple[float, int, int]] = []
    for argv in (["--ckpt_path", trained], ["--ckpt_path", inside], ["--ckpt_path", lone, "-c", data]):
        out = tmp_path / f"{len(found)}.json"
        assert kvpath("test", *argv, "--output", out) == 0
        (entry,) = results(out)
        found.append((entry["loss"], entry["tokens"], entry["step"]))
    assert found[0] == found[1] == found[2]


def test_a_saved_config_given_by_hand_works(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    argv = ["--config", trained / "config.yaml", "--ckpt_path", trained / "checkpoints" / "last.ckpt"]
    assert kvpath("test", *argv, "--output", out) == 0
    assert len(results(out)) == 1


def test_validate_finds_what_training_found(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path for path in trained.rglob("*"))
    assert kvpath("validate", "--ckpt_path", trained) == 0
    loss = metrics_of(trained)[-1]["validation/loss"]
    assert f"{loss:.4f}" in capsys.readouterr().out
    assert sorted(path for path in trained.rglob("*")) == before


def test_the_command_line_beats_pieces_and_pieces_beat_what_is_stored(trained: Path, tmp_path: Path) -> None:
    piece = tmp_path / "piece.yaml"
    piece.write_text(yaml.safe_dump({"data": {"eval_contexts": [8]}}))
    found: list[list[int]] = []
    for flags in (
        [],
        ["-c", piece],
        ["--data.eval_contexts=[4]", "-c", piece],
        ["-c", piece, "--data.eval_contexts=[4]"],
    ):
        out = tmp_path / f"{len(found)}.json"
        assert kvpath("test", "--ckpt_path", trained, "--output", out, *flags) == 0
        found.append([entry["context"] for entry in results(out)])
    assert found[0] == [16]
    assert found[1] == [8]
    assert found[3] == [4]


def test_a_conflict_with_the_stored_model_is_named(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lone = tmp_path / "alone.ckpt"
    shutil.copy(trained / "checkpoints" / "last.ckpt", lone)
    for argv in (["--ckpt_path", trained], ["--ckpt_path", lone, "-c", trained / "config.yaml"]):
        assert kvpath("test", *argv, "--output", tmp_path / "out.json") == 0
        assert "in the checkpoint" not in capsys.readouterr().err
        assert kvpath("test", *argv, "--output", tmp_path / "out.json", "--model.backbone.rope_base=5e5") == 0
        said = [line for line in capsys.readouterr().err.splitlines() if "in the checkpoint" in line]
        assert said == ["model.backbone.rope_base is 1000000.0 in the checkpoint; 500000.0, as given, is used"]


def test_predict_writes_the_likelihood_of_every_token(
    trained: Path, tmp_path: Path, region: tuple[PackedText, torch.Tensor], decoder: Decoder
) -> None:
    out = tmp_path / "predictions.jsonl"
    assert kvpath("predict", "--ckpt_path", trained, "--output", out) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    scored = [label for row in rows for label in row["labels"] if label != -100]
    assert scored == region[1][1:].tolist()
    nll, _ = brute_force(decoder, region[1], 16)
    assert sum(value for row in rows for value in row["nll"]) == pytest.approx(nll, rel=1e-5)
