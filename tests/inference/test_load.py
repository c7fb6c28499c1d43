import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

import kvpath
from kvpath.config import load_config
from kvpath.errors import UserError
from kvpath.inference import SamplingConfig, generate
from kvpath.inference.text_model import Piece, TextModel
from kvpath.model import Decoder
from tests.runs import kvpath as command

FIXTURES = Path(__file__).parent.parent / "fixtures"
RUN = FIXTURES / "format-1" / "run"
PROMPTS = ["key value", "owl", "the naïve"]


@pytest.fixture(scope="module")
def model() -> TextModel:
    """In float64, so that a batch gives what each prompt gives alone."""
    return kvpath.load(RUN, dtype="fp64")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy to be changed."""
    shutil.copytree(RUN, tmp_path / "run")
    return tmp_path / "run"


def test_results_say_all_of_a_row(model: TextModel) -> None:
    assert model.tokenizer is not None
    results = model.generate(PROMPTS, n=2, max_new_tokens=9, temperature=1.0, seed=3)
    assert [(result.prompt, result.sample) for result in results] == [(p, j) for p in PROMPTS for j in range(2)]
    ids = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    config = SamplingConfig(n=2, max_new_tokens=9, temperature=1.0, seed=3, stop_tokens=[model.tokenizer.end_of_text])
    for result, row in zip(results, generate(model.model, ids, config), strict=True):
        assert (result.tokens, result.stop_reason) == (row.tokens, row.stop_reason)
        assert result.text == model.tokenizer.decode([*row.prompt, *row.tokens])[len(result.prompt) :]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 100])
def test_results_do_not_depend_on_the_batch(model: TextModel, batch_size: int) -> None:
    sampling = dict(n=2, max_new_tokens=7, temperature=1.0)
    assert model.generate(PROMPTS, batch_size=batch_size, **sampling) == model.generate(PROMPTS, **sampling)


def test_the_pieces_of_a_row_are_its_text(model: TextModel) -> None:
    pieces: dict[int, list[Piece]] = {}
    for piece in model.stream(PROMPTS, max_new_tokens=20, temperature=1.5):
        pieces.setdefault(piece.row, []).append(piece)
    assert sorted(pieces) == [0, 1, 2]
    for row in pieces.values():
        assert [piece.result is not None for piece in row] == [False] * (len(row) - 1) + [True]
        last = row[-1].result
        assert last is not None
        assert "".join(piece.text for piece in row) == last.text
        assert len(row) > 1


def test_stop_strings_end_a_row_and_are_not_in_its_text(model: TextModel) -> None:
    free = model.generate("key value", max_new_tokens=20, temperature=1.0)[0]
    at = len(free.text) // 2
    stop = free.text[at : at + 3]
    (ended,) = model.generate("key value", max_new_tokens=20, temperature=1.0, stop=[stop, "not in it"])
    assert ended.stop_reason == "string"
    assert ended.text == free.text[: free.text.index(stop)]
    assert ended.tokens == free.tokens[: len(ended.tokens)]
    assert len(ended.tokens) < 20


def test_the_end_of_text_ends_a_row(run: Path) -> None:
    found = kvpath.load(run)
    assert found.tokenizer is not None
    with torch.no_grad():  # the final norm gives ones, so the logits are sums of the table's rows
        found.model.norm.register_forward_hook(lambda module, args, output: torch.ones_like(output))
        found.model.embedding.weight[found.tokenizer.end_of_text] = 5.0
    (result,) = found.generate("owl", temperature=0)
    assert (result.text, result.tokens, result.stop_reason) == ("", [found.tokenizer.end_of_text], "token")


def test_prompts_may_be_token_ids(model: TextModel) -> None:
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("owl")
    by_ids, by_text = (model.generate(prompt, max_new_tokens=5)[0] for prompt in (ids, "owl"))
    assert by_ids.prompt == ids
    assert (by_ids.text, by_ids.tokens) == (by_text.text, by_text.tokens)
    assert [result.tokens for result in model.generate([ids, "owl"], max_new_tokens=5, temperature=0)] == [
        model.generate("owl", max_new_tokens=5, temperature=0)[0].tokens
    ] * 2


def test_a_run_its_checkpoint_and_its_export_are_the_same_model(model: TextModel, tmp_path: Path) -> None:
    lone = tmp_path / "lone.ckpt"
    shutil.copy(RUN / "checkpoints" / "last.ckpt", lone)
    weights = kvpath.load(RUN).model.state_dict()
    for path in (RUN / "checkpoints" / "last.ckpt", lone, RUN.parent / "exported"):
        found = kvpath.load(path, tokenizer=RUN / "tokenizer.json" if path == lone else None)
        assert found.model.state_dict().keys() == weights.keys()
        assert all(torch.equal(value, weights[name]) for name, value in found.model.state_dict().items())
        assert found.generate(PROMPTS, max_new_tokens=5, temperature=0) == model.generate(
            PROMPTS, max_new_tokens=5, temperature=0
        )


def test_a_lone_checkpoint_takes_token_ids(tmp_path: Path) -> None:
    shutil.copy(RUN / "checkpoints" / "last.ckpt", tmp_path / "lone.ckpt")
    found = kvpath.load(tmp_path / "lone.ckpt")
    (result,) = found.generate([5, 6], max_new_tokens=4)
    assert (len(result.tokens), result.text) == (4, "")
    with pytest.raises(UserError, match="prompt 0 is text, and there is no tokenizer"):
        found.generate("owl")
    with pytest.raises(UserError, match="stop strings need a tokenizer"):
        found.generate([5], stop=["x"])


def test_a_run_needs_nothing_beside_it(run: Path) -> None:
    assert not Path(
        yaml.safe_load((run / "config.yaml").read_text())["data"]["source"]["init_args"]["files"][0]
    ).exists()
    assert kvpath.load(run).generate("owl", max_new_tokens=2)[0].stop_reason == "length"


def test_dtype_and_device(model: TextModel) -> None:
    assert model.model.embedding.weight.dtype == torch.float64
    assert kvpath.load(RUN).model.embedding.weight.dtype == torch.float32
    assert kvpath.load(RUN, dtype=torch.bfloat16, device="cpu").model.embedding.weight.dtype == torch.bfloat16
    assert not model.model.training
    with pytest.raises(UserError, match="dtype must be one of fp32, bf16, fp16, fp64, got int8"):
        kvpath.load(RUN, dtype="int8")
    with pytest.raises(UserError, match="device nowhere is not to be had: "):
        kvpath.load(RUN, device="nowhere")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_decoding_is_compact_where_the_strategy_can(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    compacted: list[Decoder] = []
    monkeypatch.setattr(Decoder, "compact", lambda decoder: compacted.append(decoder))
    assert compacted == [kvpath.load(RUN, compile=compiled).model]


def test_a_config_that_does_not_fit_the_weights(run: Path, tmp_path: Path) -> None:
    shutil.copytree(RUN.parent / "exported", tmp_path / "exported")
    config = tmp_path / "exported" / "config.json"
    values = json.loads(config.read_text())
    values["backbone"]["d_ff"] = 32
    config.write_text(json.dumps(values))
    with pytest.raises(
        UserError, match=r"of another model: .*w_gate.weight is \(24, 16\) in the checkpoint, \(32, 16\)"
    ):
        kvpath.load(tmp_path / "exported")
    values["backbone"] |= {"d_ff": 24, "d_modell": 3}
    config.write_text(json.dumps(values))
    with pytest.raises(UserError, match="d_modell"):
        kvpath.load(tmp_path / "exported")


@pytest.mark.parametrize("name", ["run/checkpoints/last.ckpt", "exported/model.safetensors"])
@pytest.mark.parametrize("damage", ["cut short", "empty", "text"])
def test_damaged_weights(tmp_path: Path, name: str, damage: str) -> None:
    shutil.copytree(RUN.parent, tmp_path / "all")
    file = tmp_path / "all" / name
    whole = file.read_bytes()
    file.write_bytes({"cut short": whole[: len(whole) // 2], "empty": b"", "text": b"no weights\n" * 50}[damage])
    with pytest.raises(UserError, match=f"{file} is damaged, or no "):
        kvpath.load(file)


def test_there_are_no_weights(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no weights in this directory"):
        kvpath.load(tmp_path)
    with pytest.raises(UserError, match="there is no such file or directory"):
        kvpath.load(tmp_path / "none")


def test_the_audit_takes_an_export(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("audit", "--format", "json", "--ckpt_path", RUN, RUN.parent / "exported") == 0
    of_run, of_export = json.loads(capsys.readouterr().out)
    assert of_run["parameters"] == of_export["parameters"]
    assert load_config(str(RUN / "config.yaml")).backbone.tied_embeddings
