import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvpath.cli.audit import audit_command
from kvpath.errors import UserError

BASE = ["-c", "model/98m"]
GQA = [*BASE, "-c", "attention/gqa"]
MLA = [*BASE, "-c", "attention/mla"]


def audited(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    assert audit_command([*argv, "--format", "json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_json_holds_the_promised_fields(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = audited(capsys, *GQA)
    promised = {
        "name": "gqa",
        "parameters": 98_710_016,
        "stored_elements_per_token": 6_144,
        "read_elements_per_token": 6_144,
        "allocated_bytes_per_token": 12_296,
        "forward_flops_per_token": 171_061_248,
        "training_flops_per_token": 513_183_744,
        "decode_flops_per_token": 196_214_784,
    }
    assert promised.items() <= row.items()


def test_each_piece_is_a_row_named_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    rows = audited(capsys, *BASE, "-c", "attention/kvpath_concat", "--each", "configs/ablation/g*.yaml")
    counts = {row["name"]: (row["parameters"], row["stored_elements_per_token"]) for row in rows}
    assert counts == {"g2": (100_282_880, 9_216), "g8": (98_185_728, 5_120), "g12": (97_661_440, 4_096)}


def test_each_finds_shipped_pieces_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [row["name"] for row in audited(capsys, *BASE, "--each", "configs/attention/m?a.yaml")] == [
        "mha",
        "mla",
        "mqa",
    ]
    with pytest.raises(UserError, match="--each attention/nothing: no file and no shipped piece matches"):
        audit_command([*BASE, "--each", "attention/nothing"])


def test_the_name_field_goes_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    named = tmp_path / "named.yaml"
    named.write_text("name: mine\n")
    assert audited(capsys, *GQA, "-c", str(named))[0]["name"] == "mine"


def test_a_run_is_audited_by_its_saved_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "gqa-short"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(
        "model: {backbone: {vocab_size: 100, d_model: 8, n_layers: 2, d_ff: 7, attention: {class_path: GQA,"
        " init_args: {n_heads: 2, n_kv_heads: 1, head_dim: 4}}}}\n"
    )
    for path in (run, run / "checkpoints" / "last.ckpt"):
        (row,) = audited(capsys, "--ckpt_path", str(path))
        assert row["stored_elements_per_token"] == 2 * 2 * 4
    assert audited(capsys, "--ckpt_path", str(run))[0]["name"] == "gqa-short"
    with pytest.raises(UserError, match="no config.yaml there"):
        audit_command(["--ckpt_path", str(tmp_path / "nowhere" / "at" / "all")])


def test_overrides_context_dtype_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = audited(
        capsys, *GQA, "--model.backbone.n_layers", "6", "--context", "100", "--dtype", "fp32", "--memory", "1GiB"
    )
    assert (row["stored_elements_per_token"], row["context"], row["stored_bytes_per_token"]) == (3_072, 100, 12_288)
    assert row["sequences_that_fit"] == (2**30 - 4 * row["parameters"]) // (100 * 12_288)


def test_match_solves_the_widths(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = audited(capsys, *BASE, "-c", "attention/kvpath_residual", "--match", "98,710,016")
    assert (row["d_ff"], row["parameters"], row["left_over"]) == ([1516] * 12, 98_710_016, 0)
    (row,) = audited(capsys, *MLA, "--match", "98_710_020", "--model.backbone.d_ff_multiple", "64")
    assert all(width % 64 == 0 for width in row["d_ff"])
    assert row["parameters"] + row["left_over"] == 98_710_020


def test_match_refuses_caches_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="not matched: .* got mha 12,288, mla 1,920, mqa 1,536"):
        audit_command([*BASE, "--each", "attention/m?a", "--match", "98710016", "--format", "csv"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["name"] for row in rows] == ["mha", "mla", "mqa"]


def test_draw_writes_a_png(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    audited(capsys, *GQA, "--draw", str(tmp_path / "gqa.png"))
    assert (tmp_path / "gqa.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="--draw takes one model, got 3: mha, mla, mqa"):
        audit_command([*BASE, "--each", "attention/m?a", "--draw", str(tmp_path / "all.png")])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "kvpath audit needs pieces"),
        ([*GQA, "--memory", "80GX"], "--memory must be a number of bytes or have one of KB, .* got '80GX'"),
        ([*GQA, "--match", "many"], "--match must be a number of parameters, such as 98,710,016, got 'many'"),
        ([*GQA, "--match", "5"], "parameters=5 is reached by no width: the nearest is "),
        ([*GQA, "--dtype", "int7"], "dtype must be one of .*, got 'int7'"),
        ([*GQA, "--model.backbone.d_fff", "5"], "d_fff"),
    ],
)
def test_mistakes_are_named(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        audit_command(argv)
