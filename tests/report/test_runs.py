"""Runs out of files, each model counted once, and how runs become arms."""

import json
from pathlib import Path

import pytest
import yaml

from kvpath.analysis.audit import audit
from kvpath.config import backbone_from
from kvpath.errors import UserError
from kvpath.model import BackboneConfig, Decoder
from kvpath.report import costs
from kvpath.report.arms import arms_of, references
from kvpath.report.curves import smoothed
from kvpath.report.runs import read_runs
from tests.report.made import CONCAT, GQA, backbone, make_run


def names(folder: Path) -> list[str]:
    runs, _ = read_runs([folder])
    return [arm.name for arm in arms_of(runs)[0]]


def test_costs_are_those_of_audit(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "2k", CONCAT, seed=3, name="mine")
    (run,), left_out = read_runs([tmp_path, tmp_path / "a"])
    expected = audit(backbone_from(backbone(CONCAT)), context=64)
    assert (run.costs.parameters, run.costs.stored) == (expected.parameters, expected.stored_elements_per_token)
    assert run.costs.read == expected.read_elements_per_token
    assert (run.name, run.seed, run.tokens, run.finished, left_out) == ("mine", (3, 3), 40 * 256, True, [])


def test_the_two_small_models_are_matched() -> None:
    gqa, concat = (audit(backbone_from(backbone(attention)), context=64) for attention in (GQA, CONCAT))
    assert gqa.stored_elements_per_token == concat.stored_elements_per_token
    assert abs(gqa.parameters / concat.parameters - 1) < 0.0005


def test_a_hundred_runs_count_each_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[BackboneConfig] = []
    real = costs.on_meta

    def counting(config: BackboneConfig) -> Decoder:
        counted.append(config)
        return real(config)

    monkeypatch.setattr(costs, "on_meta", counting)
    for seed in range(25):
        for attention in (GQA, CONCAT):
            for seq_len in (64, 128):
                longest = backbone(attention, max_seq_len=seq_len)
                place = tmp_path / f"{attention['class_path']}{seed}" / str(seq_len)
                make_run(place, seed=seed, model=longest, seq_len=seq_len, logged=2)
    runs, _ = read_runs([tmp_path])
    assert (len(runs), len(counted)) == (100, 2)
    assert [len(arm.runs) for arm in arms_of(runs)[0]] == [25] * 4


def test_what_cannot_be_read_is_left_out_with_a_line(tmp_path: Path) -> None:
    make_run(tmp_path / "good")
    (make_run(tmp_path / "torn") / "summary.json").write_text("{", encoding="utf-8")
    (make_run(tmp_path / "other") / "config.yaml").write_text("model: 3", encoding="utf-8")
    (make_run(tmp_path / "words") / "perplexity.json").write_text('[{"corpus": "a"}]', encoding="utf-8")
    (make_run(tmp_path / "odd") / "perplexity.json").write_text("[3]", encoding="utf-8")
    (make_run(tmp_path / "unknown", model={**backbone(), "d_mode": 3}))
    (make_run(tmp_path / "nan", perplexities={("c4", 64): 3.0}) / "perplexity.json").write_text(
        '[{"context": 64, "step": 1, "corpus": "c4", "dtype": "x", "nll_sum": NaN, "tokens": 3}]', encoding="utf-8"
    )
    runs, left_out = read_runs([tmp_path])
    assert [run.path.name for run in runs] == ["good"]
    assert len(left_out) == 6
    text = "\n".join(left_out)
    for said in (
        "summary.json cannot be read",
        "model.backbone.attention.class_path is None",
        "entry 0 is no result: 'context' is missing",
        "d_mode",
        "nan is not finite",
    ):
        assert said in text


@pytest.mark.parametrize("make", [lambda path: path, lambda path: path / "missing"])
def test_no_runs_are_an_error(tmp_path: Path, make: object) -> None:
    with pytest.raises(UserError, match="no run|no such folder"):
        read_runs([make(tmp_path)])  # type: ignore[operator]


def test_a_line_that_was_cut_short_and_one_without_a_loss_are_passed_over(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", planned=None) / "metrics.jsonl"
    lines = ['{"step": 1, "train/loss": 3}', '{"step": 2, "train/loss": null}', "[1]", '{"step": 3, "train']
    path.write_text("\n".join(lines), encoding="utf-8")
    (run,), _ = read_runs([tmp_path])
    assert run.curves.training == ((256.0, 3.0),)
    assert (run.step, run.finished) == (2, False)


def test_smoothing_keeps_the_ends_and_the_mean() -> None:
    points = tuple((float(x), 1.0 + (-1) ** x) for x in range(2000))
    smooth = smoothed(points)
    assert len(smooth) <= 160
    assert (smooth[0][0], smooth[-1][0]) == (0.0, 1999.0)
    assert all(0.9 < y < 1.1 for x, y in smooth if x > 500)


def test_arms_are_named_by_what_most_of_their_layout_have_not(tmp_path: Path) -> None:
    shorter = {**CONCAT, "init_args": {**CONCAT["init_args"], "path_length": 1}}
    make_run(tmp_path / "a", GQA)
    for seed in (0, 1):
        make_run(tmp_path / f"b{seed}", CONCAT, seed=seed)
    make_run(tmp_path / "c", CONCAT, learning_rate=2e-3)
    make_run(tmp_path / "d", shorter)
    mha = {"class_path": "GQA", "init_args": {"n_heads": 2, "n_kv_heads": 2, "head_dim": 8}}
    make_run(tmp_path / "e", mha)
    assert sorted(names(tmp_path)) == [
        "GQA",
        "KVPath-Concat",
        "KVPath-Concat, learning_rate 0.002",
        "KVPath-Concat, path_length 1",
        "MHA",
    ]


def test_a_search_of_learning_rates_names_all_of_them(tmp_path: Path) -> None:
    for index, rate in enumerate((1e-3, 2e-3)):
        make_run(tmp_path / str(index), learning_rate=rate)
    assert names(tmp_path) == ["GQA, learning_rate 0.001", "GQA, learning_rate 0.002"]


def test_a_key_that_older_versions_did_not_write_sets_no_arm_apart(tmp_path: Path) -> None:
    for seed in (0, 1):
        make_run(tmp_path / str(seed), seed=seed)
    file = tmp_path / "1" / "config.yaml"
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    config["data"]["packing"] = "contiguous"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    assert names(tmp_path) == ["GQA"]


def test_a_run_of_the_same_arm_and_seed_is_no_second_seed(tmp_path: Path) -> None:
    make_run(tmp_path / "a", planned=80)
    make_run(tmp_path / "b")
    arms, doubled = arms_of(read_runs([tmp_path])[0])
    assert [[run.path.name for run in arm.runs] for arm in arms] == [["b"]]  # the finished one
    assert doubled == [f"{tmp_path}/a is left out: {tmp_path}/b is of the same arm, stage and seed"]


def test_references_are_found_by_layout_in_any_writing(tmp_path: Path) -> None:
    make_run(tmp_path / "a", GQA)
    make_run(tmp_path / "b", CONCAT)
    arms, _ = arms_of(read_runs([tmp_path])[0])
    assert references(arms, []) == ["GQA"]
    assert references(arms, ["kvpath_concat", "gqa"]) == ["KVPath-Concat", "GQA"]
    with pytest.raises(UserError, match="--reference mla: no arm is called so; there are GQA; KVPath-Concat"):
        references(arms, ["mla"])


def test_a_config_with_a_tag_runs_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    (run / "config.yaml").write_text("model: !!python/object/apply:os.system ['true']", encoding="utf-8")
    _, left_out = read_runs([tmp_path])
    assert "cannot be read" in left_out[0]
    assert yaml.safe_load((tmp_path / "b" / "config.yaml").read_text(encoding="utf-8"))
    assert json.loads((tmp_path / "b" / "summary.json").read_text(encoding="utf-8"))["step"] == 40
