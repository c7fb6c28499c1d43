import json
from typing import Any

import pytest

from kvpath.cli.plan import plan_command
from kvpath.errors import UserError
from kvpath.training.deepspeed import mistakes
from tests.runs import kvpath

STUDY = [
    *("-c", "model/98m", "-c", "attention/kvpath_concat", "-c", "hardware/zero2"),
    *("--nodes", "2", "--devices", "8", "--memory", "80GB"),
    *("--model.backbone.d_model", "64", "--model.backbone.n_layers", "4", "--model.backbone.d_ff", "64"),
    *("--data.budget.global_batch_sequences", "32"),
]


def plan(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert kvpath("plan", *argv, "--format", "json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def best(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    (stage,) = plan(capsys, *STUDY, "-c", "stage/2k", *argv)["stages"]
    found: dict[str, Any] = stage["best"]
    return found


def test_each_stage_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    stages = plan(capsys, *STUDY, "--stages", "stage/2k", "stage/8k", "--peak_flops", "989e12")["stages"]
    assert [stage["name"] for stage in stages] == ["stage/2k", "stage/8k"]
    for stage in stages:
        assert stage["fits"]
        assert stage["best"]["fits"]
        assert stage["best"]["total"] <= 76e9
        assert stage["plan"]["world_size"] == 16
        assert stage["plan"]["tokens"] == stage["plan"]["steps"] * stage["plan"]["tokens_per_step"]
        assert stage["seconds"] == pytest.approx(stage["days"] * 86400)
        assert stage["seconds"] > 0
        parts = ("weights", "gradients", "optimizer", "buffers", "activations")
        assert stage["best"]["total"] == sum(stage["best"][part] for part in parts)
    assert stages[0]["best"]["weights"] == 2 * stages[0]["parameters"]


def test_stages_have_budgets_of_their_own_and_a_total(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*STUDY, "--stages", "stage/2k", "stage/8k", "--tokens", "3e9", "1e9", "--tokens_per_second", "1e5"]
    found = plan(capsys, *argv)
    tokens = [stage["plan"]["tokens"] for stage in found["stages"]]
    assert tokens == pytest.approx([3e9, 1e9], rel=1e-3)
    assert found["total"]["tokens"] == sum(tokens)
    assert found["total"]["seconds"] == pytest.approx(sum(tokens) / 16e5)
    assert found["total"]["disk"] == 7 * found["stages"][0]["checkpoint"]
    assert kvpath("plan", *argv) == 0
    assert f"in all: {sum(tokens):,} tokens" in capsys.readouterr().out


def test_the_machine_is_told_and_which_options_fit_it(capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--memory", "1.6GB", "--reserve", "0.1GB"]
    found = plan(capsys, *STUDY, "-c", "stage/2k", "--data.budget.global_batch_sequences", "16", *machine)
    assert found["machine"]["ranks"] == 16
    assert found["machine"]["room"] == 1_500_000_000
    for option in found["stages"][0]["options"]:
        assert option["fits"] == (option["total"] <= 1_500_000_000)


def test_a_table_says_what_to_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvpath("plan", *STUDY, "-c", "stage/2k") == 0
    text = capsys.readouterr().out
    assert "take this" in text
    assert "--data.budget.micro_batch" in text
    assert "state --peak_flops" in text
    assert "a run keeps up to 3 and writes one more" in text
    assert "in all" not in text


def test_what_does_not_fit_is_said_and_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvpath("plan", *STUDY, "-c", "stage/2k", "--memory", "200MB", "--reserve", "1MB") == 2
    text = capsys.readouterr().out
    assert "nothing fits: one sequence, its blocks run again, needs" in text
    assert "a smaller --trainer.strategy.bucket_elements would help" in text
    assert "take:" not in text


def test_the_strategy_is_resolved_as_in_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert best(capsys)["buffers"] == 2 * 2 * 200_000_000
    assert best(capsys, "--trainer.strategy.stage", "3")["buffers"] == 2 * 200_000_000
    assert best(capsys, "--trainer.strategy.overlap_comm", "false")["buffers"] == 2 * 200_000_000
    over = ["--trainer.strategy.config", '{"zero_optimization": {"reduce_bucket_size": 1e6}}']
    assert best(capsys, "--trainer.strategy.bucket_elements", "10", *over)["buffers"] == 2 * 2 * 1_000_000


def test_deepspeed_is_needed_where_a_run_is_and_not_where_it_is_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mistakes, "find_spec", lambda _: None)
    assert best(capsys, "--trainer.strategy.stage", "1")["fits"]
    with pytest.raises(UserError, match="bucket_elements"):
        plan_command([*STUDY, "-c", "stage/2k", "--trainer.strategy.bucket_elements", "-1"])


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--nodes", "2"], "kvpath plan needs pieces"),
        (["-c", "model/98m", "-c", "attention/gqa"], "data.seq_len is not stated: add a stage piece"),
        ([*STUDY, "-c", "stage/2k", "--memory", "much"], "--memory must be a number of bytes"),
        ([*STUDY, "-c", "stage/2k", "--reserve", "9x"], "--reserve must be a number of bytes"),
        ([*STUDY, "-c", "stage/2k", "--nodes", "7"], "is not a multiple of"),
        ([*STUDY, "-c", "stage/2k", "--tokens", "1e9", "1e9"], "--tokens must be 1, one for each stage, got 2"),
        (
            [*STUDY, "-c", "stage/2k", "--trainer.strategy.stage", "5"],
            "trainer.strategy.stage must be 1 or 2 or 3, got 5",
        ),
        ([*STUDY, "-c", "stage/2k", "--trainer.strategy.bogus", "3"], "Option 'bogus' is not accepted"),
        ([*STUDY, "-c", "stage/2k", "--trainer.bogus", "3"], "unrecognized arguments: --trainer.bogus"),
        ([*STUDY, "-c", "stage/2k", "--trainer.max_epochs", "3"], "trainer.max_epochs=3 cannot be set here"),
        ([*STUDY, "-c", "stage/2k", "--trainer.strategy.offload_parameters", "true"], "needs stage 3, got stage 2"),
        ([*STUDY, "-c", "stage/2k", "--trainer.strategy", "deepspeed"], "-c hardware/zero2"),
        ([*STUDY, "-c", "stage/2k", "--trainer.strategy", "fsdp"], "trainer.strategy fsdp is none whose memory"),
        ([*STUDY, "-c", "stage/2k", "--trainer.precision", "16-mixed"], "trainer.precision must be .* got 16-mixed"),
        (
            [*STUDY, "-c", "stage/2k", "--trainer.devices", "4"],
            "=4 is not --devices 8: state --devices 4",
        ),
        ([*STUDY, "-c", "stage/2k", "--trainer.num_nodes", "4"], "trainer.num_nodes=4 is not --nodes 2"),
        ([*STUDY, "-c", "stage/2k", "--tokens_per_second", "inf"], "tokens_per_second must be positive and finite"),
    ],
)
def test_mistakes_are_named(argv: list[str], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        plan_command(argv)
