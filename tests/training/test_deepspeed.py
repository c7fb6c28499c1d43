import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpath.errors import UserError
from kvpath.inference.load import load
from kvpath.training.bad_batch import BadBatch
from kvpath.training.deepspeed import mistakes, strategy
from kvpath.training.deepspeed.directory import is_sharded
from kvpath.training.stored_config import Damaged, read_checkpoint
from tests.runs import kvpath, write_config
from tests.training import zero_ranks
from tests.training.zero_ranks import EVERY, KINDS, Plan, on_ranks

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

EQUAL = [
    Plan("gqa-some", "zero1"),
    Plan("gqa-some", "zero3", activation_checkpointing=True),
    Plan("concat-some", "zero2", tied=True),
    Plan("concat-some", "zero3", tied=True),
]
BF16 = [Plan("gqa-some", kind, precision="bf16-mixed") for kind in ("ddp", "zero1", "zero2", "zero3+offload")]
BACK = [Plan("gqa-some", kind, what="back") for kind in ("zero2", "zero3")]
RESUMED = [Plan("gqa-some", "zero2", tied=True, what="resume"), Plan("concat-some", "zero3", what="resume")]
STREAMED = Plan("gqa-some", "zero2", what="resume", stream=True)
POISONED = [Plan("gqa-some", kind, what=what) for what in ("skip", "stop") for kind in ("ddp", "zero2")]
OTHERS_RESUMED = [
    replace(STREAMED, strategy="zero3"),
    Plan("concat-some", "zero1", what="resume"),
    Plan("concat-some", "zero3+offload", tied=True, what="resume"),
    Plan("concat-some", "zero2", precision="bf16-mixed", what="resume"),
    Plan("concat-some", "zero3", precision="bf16-mixed", what="resume"),
]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def reports(corpus: Path, out: Path) -> dict[str, Any]:
    return on_ranks([*EQUAL, *BF16, *BACK, *RESUMED, STREAMED, *POISONED], corpus, out)


def assert_as_on_one(plan: Plan, report: dict[str, Any], corpus: Path, folder: Path) -> None:
    alone = zero_ranks.run(replace(plan, strategy="auto"), corpus, folder / "alone", ranks=1)
    assert len(alone["losses"]) == zero_ranks.STEPS
    for name in ("losses", "gradient_norms", "validation"):
        assert report[name] == pytest.approx(alone[name], rel=1e-5), name


@needs_deepspeed
@pytest.mark.parametrize("plan", EQUAL, ids=str)
def test_ranks_train_as_one_does(plan: Plan, reports: dict[str, Any], corpus: Path, tmp_path: Path) -> None:
    assert_as_on_one(plan, reports[str(plan)], corpus, tmp_path)


@needs_deepspeed
@pytest.mark.parametrize("plan", BF16, ids=str)
def test_ranks_train_in_bf16_as_one_does_in_float32_but_for_its_rounding(
    plan: Plan, reports: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    alone = zero_ranks.run(replace(plan, strategy="auto", precision="32-true"), corpus, tmp_path / "alone", ranks=1)
    report = reports[str(plan)]
    assert report["losses"] != alone["losses"]
    assert report["losses"] == pytest.approx(alone["losses"], rel=2**-10)
    assert report["gradient_norms"] == pytest.approx(alone["gradient_norms"], rel=2**-6)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_as_one_does_with_every_attention(kind: str, corpus: Path, tmp_path: Path) -> None:
    plans = {str(plan): plan for plan in EVERY if plan.strategy == kind}
    for name, report in on_ranks(list(plans.values()), corpus, tmp_path).items():
        assert_as_on_one(plans[name], report, corpus, tmp_path)


@needs_deepspeed
@pytest.mark.parametrize("plan", BACK, ids=str)
def test_a_spike_goes_back_to_a_checkpoint_as_on_one(
    plan: Plan, reports: dict[str, Any], out: Path, corpus: Path, tmp_path: Path
) -> None:
    assert '"back"' in (out / str(plan) / "events.jsonl").read_text()
    assert_as_on_one(plan, reports[str(plan)], corpus, tmp_path)


@needs_deepspeed
@pytest.mark.parametrize("plan", POISONED, ids=str)
def test_a_gradient_of_one_rank_that_is_no_number_is_left_out_by_both(
    plan: Plan,
    reports: dict[str, Any],
    out: Path,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report, folder = reports[str(plan)], out / str(plan)
    alone = zero_ranks.run(replace(plan, strategy="auto"), corpus, tmp_path / "alone", ranks=1)
    one, other = report["of_ranks"]
    assert one == other
    step = zero_ranks.NOT_TAKEN + 1
    if plan.what == "skip":
        assert one == {"error": None, "left_out": [[step, step]]}
        for name in ("losses", "validation"):
            assert report[name] == pytest.approx(alone[name], rel=1e-5), name
    else:
        assert f"step {step}: the norm of the gradient is " in one["error"]
    (event,) = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (event["step"], event["action"]) == (step, plan.what)
    batches = sorted(path.name for path in (folder / "bad_batches").iterdir())
    assert batches == [f"step-000004-rank{rank}.{kind}" for rank in (0, 1) for kind in ("json", "safetensors")]
    whole = BadBatch.read(tmp_path / "alone" / "bad_batches" / "step-000004-rank0.json")
    shares = [BadBatch.read(folder / "bad_batches" / f"step-000004-rank{rank}.json") for rank in (0, 1)]
    assert [share.rank for share in shares] == [0, 1]
    assert torch.equal(torch.cat([share.tensors["tokens"] for share in shares]), whole.tensors["tokens"])
    capsys.readouterr()
    batch = folder / "bad_batches" / "step-000004-rank1.json"
    assert kvpath("inspect", batch, "--ckpt_path", folder / "last.ckpt", "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rank"], found["weights_of_step"]) == (1, zero_ranks.STEPS if plan.what == "skip" else 2)


def assert_same_as_unbroken(report: dict[str, Any]) -> None:
    for name in ("losses", "validation", "hash"):
        unbroken, resumed = report[name]
        assert resumed == unbroken
    assert report["same_weights"]
    assert all(report["same_weights"])


@needs_deepspeed
@pytest.mark.parametrize("plan", [*RESUMED, STREAMED], ids=str)
def test_a_resumed_run_is_bitwise_the_unbroken_one(plan: Plan, reports: dict[str, Any]) -> None:
    assert_same_as_unbroken(reports[str(plan)])


@needs_deepspeed
@pytest.mark.slow
def test_a_resumed_run_is_bitwise_the_unbroken_one_otherwise_too(corpus: Path, tmp_path: Path) -> None:
    for report in on_ranks(OTHERS_RESUMED, corpus, tmp_path).values():
        assert_same_as_unbroken(report)


# Checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=RESUMED, ids=str)
def directory(request: pytest.FixtureRequest, reports: dict[str, Any], out: Path) -> Path:
    """A checkpoint that two ranks wrote."""
    return out / str(request.param) / "unbroken" / "last.ckpt"


@needs_deepspeed
def test_weights_are_what_deepspeeds_own_converter_makes(directory: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    theirs = get_fp32_state_dict_from_zero_checkpoint(str(directory), tag="checkpoint")
    ours = read_checkpoint(directory)["state_dict"]
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


@needs_deepspeed
def test_a_directory_is_read_like_a_file(directory: Path) -> None:
    stored = read_checkpoint(directory)
    assert stored["global_step"] == zero_ranks.STEPS
    assert stored["kvpath"]["backbone"]["n_layers"] > 0
    assert "optimizer" not in stored
    assert stored["loops"]


@needs_deepspeed
@pytest.mark.parametrize("part", ["latest", "checkpoint/*rank_1*optim_states.pt", "checkpoint/*model_states.pt"])
@pytest.mark.parametrize("fault", ["missing", "cut off"])
def test_a_damaged_directory_is_named(directory: Path, part: str, fault: str, tmp_path: Path) -> None:
    copy = tmp_path / "last.ckpt"
    shutil.copytree(directory, copy)
    file = max(copy.glob(part))
    if fault == "missing" or part == "latest":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-100])
    assert is_sharded(copy)
    with pytest.raises(Damaged, match=str(copy)):
        read_checkpoint(copy)


@needs_deepspeed
def test_a_directory_is_exported_and_loaded(directory: Path, tmp_path: Path) -> None:
    assert kvpath("export", "--ckpt_path", directory, "--output", tmp_path / "exported") == 0
    exported, direct = load(tmp_path / "exported").model, load(directory).model
    stored = read_checkpoint(directory)["state_dict"]
    for name, value in direct.state_dict().items():
        assert torch.equal(value, stored[f"model.{name}"])
        assert torch.equal(value, exported.state_dict()[name])


# Mistakes -------------------------------------------------------------------------------------------------------------


def test_without_deepspeed_a_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mistakes, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'kvpath\[deepspeed\]'"):
        strategy.ZeRO()


def test_the_command_line_says_so_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mistakes, "find_spec", lambda _: None)
    config = write_config(tmp_path)
    assert kvpath("fit", "-c", "hardware/zero2", "-c", config, "--run", tmp_path / "run") == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1
    assert "pip install 'kvpath[deepspeed]'" in errors[0]
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_every_wrong_field_is_named() -> None:
    with pytest.raises(UserError) as caught:
        strategy.ZeRO(
            stage=4,  # type: ignore[arg-type]
            offload_parameters=True,
            bucket_elements=0,
            live_elements=0,
            timeout_minutes=0,
            config={"optimizer": {}},
        )
    with pytest.raises(UserError, match="data_types.grad_accum_dtype with stage 1"):
        strategy.ZeRO(stage=1, config={"data_types": {"grad_accum_dtype": "fp32"}})
    for field in (
        "stage must be",
        "offload_parameters",
        "bucket_elements",
        "live_elements",
        "timeout_minutes",
        "config must not",
    ):
        assert field in str(caught.value)


def test_an_optimizer_that_needs_whole_matrices_is_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    mistakes.check_can_be_sharded(torch.optim.AdamW([weight]), 3)
    with pytest.raises(UserError, match="Adafactor cannot be sharded by ZeRO stage 2"):
        mistakes.check_can_be_sharded(torch.optim.Adafactor([weight]), 2)
