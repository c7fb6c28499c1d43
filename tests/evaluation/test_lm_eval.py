"""Our models in lm-evaluation-harness: on tasks of local files, held against its own adapter for Hugging Face."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import kvpath as package
from kvpath.attention import GQA, AttentionStrategy, KVPathConcat
from kvpath.errors import UserError
from kvpath.inference.text_model import TextModel
from kvpath.interop.llama import llama_from
from kvpath.model import BackboneConfig, Decoder
from tests.inference.test_load import RUN
from tests.runs import WORDS, kvpath

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (the extra eval)")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from kvpath.evaluation.lm_eval import KvpathLM

TEXTS = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(4)]
MAX_LENGTH = 40
GQA_2 = GQA(n_heads=4, n_kv_heads=2, head_dim=6)


def text_model(attention: AttentionStrategy = GQA_2, dtype: torch.dtype = torch.float64) -> TextModel:
    """Random weights large enough that answers differ, with the tokenizer of a trained run."""
    tokenizer = package.load(RUN).tokenizer
    assert tokenizer is not None
    config = BackboneConfig(
        vocab_size=tokenizer.vocab_size, d_model=20, n_layers=4, d_ff=28, pad_vocab_to=1, max_seq_len=MAX_LENGTH,
        attention=attention, init_std=0.3,
    )  # fmt: skip
    model = Decoder(config).to(dtype).eval()
    model.compact()
    return TextModel(model, tokenizer)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def hugging_face(model: TextModel, **more: Any) -> Any:
    """The harness's own adapter on the same weights."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(RUN / "tokenizer.json"), eos_token="<|endoftext|>")
    llama = llama_from(model.model).eval()
    return HFLM(pretrained=llama, tokenizer=tokenizer, max_length=MAX_LENGTH, device="cpu", **more)


PAIRS = [
    ("key value", " path"),
    ("key value", " alpha delta of"),
    ("", "naïve layer head"),
    ("the owl  ", "state"),
    (" ".join(TEXTS), " union"),
    (TEXTS[1], " fellow citizens"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-5), (torch.float32, 1e-4)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_log_likelihoods_are_those_of_hugging_faces_adapter(
    dtype: torch.dtype, tolerance: float, batch_size: int
) -> None:
    model = text_model(dtype=dtype)
    theirs = hugging_face(model, batch_size=batch_size)
    ours = KvpathLM(model, batch_size=batch_size)
    pairs = [*PAIRS, *((context, likeliest(model, context)) for context in ("key value", "owl"))]
    expected = theirs.loglikelihood(requests("loglikelihood", *pairs))
    found = ours.loglikelihood(requests("loglikelihood", *pairs))
    assert [row[0] for row in found] == pytest.approx([row[0] for row in expected], abs=tolerance, rel=0)
    greedy = [row[1] for row in found]
    assert greedy == [row[1] for row in expected]
    assert set(greedy) == {True, False}
    rolling = requests("loglikelihood_rolling", *((text,) for text in [*TEXTS, " ".join(TEXTS), "owl"]))
    assert ours.loglikelihood_rolling(rolling) == pytest.approx(
        theirs.loglikelihood_rolling(rolling), abs=3 * tolerance, rel=0
    )


def likeliest(model: TextModel, context: str) -> str:
    """Text that is greedy by construction, if its tokens come back from it."""
    return model.generate(context, max_new_tokens=2, temperature=0)[0].text


@pytest.mark.parametrize("batch_size", [1, 3])
def test_generations_are_those_of_hugging_faces_adapter(batch_size: int) -> None:
    model = text_model()
    free = model.generate(TEXTS[0], max_new_tokens=8, temperature=0)[0].text
    ways = [
        {"until": [], "max_gen_toks": 9},
        {"until": [free[3:5], "zzz"], "max_gen_toks": 8, "do_sample": False},
        {"until": "e", "max_gen_toks": 12, "temperature": 0.0},
    ]
    contexts = ["owl", TEXTS[0][:20], TEXTS[0], " ".join(TEXTS)]
    asked = requests("generate_until", *((context, way) for context in contexts for way in ways))
    found = KvpathLM(model, batch_size=batch_size).generate_until(asked)
    assert found == hugging_face(model, batch_size=batch_size).generate_until(asked)
    assert len(set(found)) > 4


@pytest.mark.parametrize(
    "attention", [GQA_2, KVPathConcat(n_heads=4, n_kv_heads=2, head_dim=9, delta_dim=6, path_length=2)], ids=str
)
def test_answers_do_not_depend_on_the_batch_or_the_order(attention: AttentionStrategy) -> None:
    model = text_model(attention)
    one, many = KvpathLM(model), KvpathLM(model, batch_size="auto")
    pairs = requests("loglikelihood", *PAIRS)
    drawn = {"do_sample": True, "max_gen_toks": 6, "until": []}
    asked = requests("generate_until", *((text, drawn) for text in ["owl", "owl", *TEXTS]))
    found = one.loglikelihood(pairs)
    assert many.loglikelihood(pairs[::-1])[::-1] == [
        (pytest.approx(value, abs=1e-9), is_greedy) for value, is_greedy in found
    ]
    assert many.generate_until(asked) == one.generate_until(asked)
    first, second, *_ = one.generate_until(asked)
    assert first != second


def test_scoring_and_generating_agree_on_what_is_greedy() -> None:
    model = text_model(KVPathConcat(n_heads=4, n_kv_heads=2, head_dim=9, delta_dim=6, path_length=2))
    tokens = model.generate("the owl", max_new_tokens=5, temperature=0)[0].tokens
    context = KvpathLM(model).tok_encode("the owl")
    (found,) = KvpathLM(model)._loglikelihood_tokens([(None, context, tokens)])
    assert found[1]


def test_a_context_that_is_too_long_loses_its_beginning_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    lm = KvpathLM(text_model())
    long = " ".join(TEXTS)
    kept = lm.tok_encode(long + " union")[-MAX_LENGTH - 1 :]
    (found,) = lm.loglikelihood(requests("loglikelihood", (long, " union")), disable_tqdm=True)
    n = len(lm.tok_encode(long + " union")) - len(lm.tok_encode(long))
    (expected,) = lm._loglikelihood_tokens([(None, kept[:-n], kept[-n:])], disable_tqdm=True)
    assert found == expected
    assert "warning: 1 of 1 contexts are cut from the left to fit into max_length=40" in capsys.readouterr().err


def test_every_answer_is_given_to_the_cache() -> None:
    class Hook:
        kept: list[tuple[str, Any, Any]] = []

        def add_partial(self, kind: str, arguments: Any, answer: Any) -> None:
            self.kept.append((kind, arguments, answer))

    lm = KvpathLM(text_model(), batch_size=2)
    lm.set_cache_hook(Hook())  # type: ignore[arg-type]
    answers = lm.loglikelihood(requests("loglikelihood", *PAIRS))
    assert sorted(Hook.kept) == sorted(zip(["loglikelihood"] * len(PAIRS), PAIRS, answers, strict=True))
    Hook.kept.clear()
    (total,) = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (" ".join(TEXTS),)))
    assert Hook.kept == [("loglikelihood_rolling", (" ".join(TEXTS),), total)]
    Hook.kept.clear()
    way = {"until": ["e"], "max_gen_toks": 4}
    (text,) = lm.generate_until(requests("generate_until", ("owl", way)))
    assert Hook.kept == [("generate_until", ("owl", way), text)]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda lm: lm.generate_until(requests("generate_until", ("owl", {}))),
            "max_gen_toks=256 must be below max_le",
        ),
        (lambda lm: lm.loglikelihood(requests("loglikelihood", ("", " ".join(TEXTS)))), "does not fit into max_length"),
        (lambda lm: lm.apply_chat_template([]), "no chat template"),
    ],
)
def test_what_cannot_be_asked(ask: Callable[[KvpathLM], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ask(KvpathLM(text_model()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("ckpt_path=no/such", "no/such"),
        (f"ckpt_path={RUN},dtype=int8", "dtype must be one of"),
        (f"ckpt_path={RUN},parallelize=1", "there is no parallelize; there are ckpt_path"),
        (f"ckpt_path={RUN},pretrained={RUN}", "must name one run as ckpt_path or pretrained"),
        ("dtype=fp64", "must name one run as ckpt_path or pretrained"),
    ],
)
def test_model_args_that_are_wrong(arguments: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        get_model("kvpath").create_from_arg_string(arguments)
    with pytest.raises(UserError, match="batch_size must be a positive number or auto, got some"):
        KvpathLM(text_model(), batch_size="some")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder of three tasks, one of each kind of request, and their documents."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    documents = [
        {
            "text": text,
            "question": text[:15],
            "choices": [" owl", " path of", " 1,024"],
            "answer": i % 3,
            "long": text * 2,
        }
        for i, text in enumerate(TEXTS)
    ]
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents), encoding="utf-8")
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "documents.jsonl")}, "cache_dir": str(tmp_path / "cache"),
        },
        "test_split": "test",
    }  # fmt: skip
    kinds: dict[str, dict[str, Any]] = {
        "toy_choice": {
            "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "toy_rolling": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{long}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "toy_generate": {
            "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{text}}",
            "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 8, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    }  # fmt: skip
    for name, kind in kinds.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **kind}), encoding="utf-8")
    return folder


KINDS = ["toy_choice", "toy_rolling", "toy_generate"]


def test_tasks_of_local_files_give_what_hugging_faces_adapter_gives(tasks: Path) -> None:
    model = text_model()
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    ours, theirs = (
        simple_evaluate(model=lm, tasks=KINDS, task_manager=manager, bootstrap_iters=0)
        for lm in (KvpathLM(model, batch_size=3), hugging_face(model, batch_size=3))
    )
    assert ours is not None
    assert theirs is not None
    for name in KINDS:
        numbers = {key: value for key, value in theirs["results"][name].items() if isinstance(value, float)}
        assert numbers
        assert {key: ours["results"][name][key] for key in numbers} == pytest.approx(numbers, rel=1e-5)
        for one, other in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            assert one["doc"] == other["doc"]
    assert [row["resps"] for row in ours["samples"]["toy_generate"]] == [
        row["resps"] for row in theirs["samples"]["toy_generate"]
    ]


# The harness reads all of its own tasks first, which takes most of the time.
@pytest.mark.parametrize("by", ["ckpt_path", pytest.param("model_args", marks=pytest.mark.slow)])
def test_the_command_writes_the_harnesss_own_results(
    by: str, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named: dict[str, list[str | Path]] = {
        "ckpt_path": ["--ckpt_path", RUN, "--model_args", "dtype=fp64"],
        "model_args": ["run", "--model", "kvpath", "--model_args", f"ckpt_path={RUN},dtype=fp64"],
    }
    flags = ["--include_path", tasks, "--output_path", tmp_path / "out", "--log_samples", "--batch_size", "2"]
    assert kvpath("lm-eval", *named[by], "--tasks", ",".join(KINDS), *flags, "--limit", "3") == 0
    assert "|toy_choice" in capsys.readouterr().out
    (file,) = (tmp_path / "out").rglob("results_*.json")
    written = json.loads(file.read_text(encoding="utf-8"))
    assert set(written["results"]) == set(KINDS)
    assert written["config"]["model"] == "kvpath"
    assert written["model_name"] == str(RUN)
    assert written["config"]["model_dtype"] == "torch.float64"
    assert {name: row["effective"] for name, row in written["n-samples"].items()} == dict.fromkeys(KINDS, 3)
    assert len(list((tmp_path / "out").rglob("samples_*.jsonl"))) == 3


@pytest.mark.slow
def test_a_task_that_there_is_not_is_said_by_the_harness(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((ValueError, SystemExit), match="no_such_task|1"):
        kvpath("lm-eval", "--ckpt_path", RUN, "--tasks", "no_such_task")
