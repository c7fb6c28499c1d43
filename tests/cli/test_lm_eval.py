"""`kvpath lm-eval` up to where the harness takes over; what follows is in tests/evaluation/test_lm_eval.py."""

import sys
from importlib.util import find_spec

import pytest

from kvpath.errors import UserError
from kvpath.evaluation.harness_ranks import Ranks
from kvpath.evaluation.harness_sampling import sampling_fields
from tests.cli.test_errors import refused
from tests.inference.test_load import RUN
from tests.runs import kvpath


@pytest.mark.parametrize("flags", [[], ["--ckpt_path", str(RUN), "--tasks", "arc_easy"], ["ls", "tasks"]], ids=len)
def test_without_the_harness_it_says_how_to_install_it(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    said = refused(capsys, "lm-eval", *flags)
    assert said == "kvpath lm-eval needs lm-evaluation-harness: pip install 'kvpath[eval]'"


def test_help_needs_no_harness(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit) as ended:
        kvpath("lm-eval", "--help")
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "--ckpt_path RUN" in said
    assert "`kvpath lm-eval run --help` lists the flags of the harness" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks", "arc_easy"], "--ckpt_path must name one run, got none"),
        (["--ckpt_path", "no/such"], "no/such"),
        (["--model_args", "ckpt_path=no/such"], "no/such"),
        (["--ckpt_path", "a", "--model_args", "ckpt_path=b"], "--ckpt_path must name one run, got b, a"),
        (["--ckpt_path", "runs/a,b"], "ckpt_path must hold no comma and no =, which divide --model_args, got runs/a,b"),
        (["--ckpt_path", str(RUN), "--model", "hf"], "--model must be kvpath, got hf: other models are for lm_eval"),
    ],
)
def test_mistakes_are_one_line(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if find_spec("lm_eval") is None:
        monkeypatch.setattr("kvpath.cli.lm_eval.find_spec", lambda name: object())
    assert message in refused(capsys, "lm-eval", *flags)


@pytest.mark.parametrize(
    ("wanted", "fields"),
    [
        ({}, {"max_new_tokens": 9, "temperature": 0.0, "stop": []}),
        ({"until": "\n", "max_gen_toks": 5}, {"max_new_tokens": 5, "temperature": 0.0, "stop": ["\n"]}),
        ({"until": ["a", ""], "max_tokens": 4}, {"max_new_tokens": 4, "temperature": 0.0, "stop": ["a"]}),
        ({"do_sample": False, "temperature": 0.7}, {"max_new_tokens": 9, "temperature": 0.0, "stop": []}),
        ({"do_sample": True}, {"max_new_tokens": 9, "temperature": 1.0, "stop": []}),
        (
            {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "seed": 3, "num_beams": 1},
            {"max_new_tokens": 9, "temperature": 0.7, "stop": [], "top_p": 0.9, "seed": 3},
        ),
    ],
)
def test_how_a_task_says_how_to_draw(wanted: dict[str, object], fields: dict[str, object]) -> None:
    assert sampling_fields(wanted, 9) == fields


def test_what_is_not_to_be_had_is_named() -> None:
    with pytest.raises(UserError, match="num_beams=4 is not to be had; .*; gen_kwargs: typical_p=0.5"):
        sampling_fields({"num_beams": 4, "typical_p": 0.5}, 9)


@pytest.mark.parametrize(
    ("asked", "cuda", "ranks", "device"),
    [
        ("cpu", True, 2, "cpu"),
        ("cuda:0", False, 1, None),
        (None, False, 2, None),
        ("cuda:1", True, 1, "cuda:1"),
        ("cuda:0", True, 2, "cuda:1"),
    ],
)
def test_the_device_of_a_rank(
    asked: str | None, cuda: bool, ranks: int, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    monkeypatch.setenv("LOCAL_RANK", "1")
    one = Ranks()
    one._world_size = ranks
    assert one.own_device(asked) == device
