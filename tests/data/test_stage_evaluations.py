"""What each stage is evaluated on, and its loaders."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvpath.data.budget import Budget
from kvpath.data.packing import IGNORE, Windows
from kvpath.data.sources import Files
from kvpath.data.tokenizer import Tokenizer
from kvpath.errors import UserError
from tests.data.modules import SEQ_LEN, Make, Recorder, trainer


@pytest.mark.parametrize("function", ["test", "predict", "validate"])
def test_evaluations_name_their_loaders(make: Make, tmp_path: Path, function: str) -> None:
    data = make(eval_contexts=[4, 16, 50], eval_batch_tokens=32)
    model = Recorder()
    getattr(trainer(tmp_path), function)(model, datamodule=data)
    evaluations = data.evaluations[function]  # type: ignore[index]
    contexts = [SEQ_LEN] if function == "validate" else [4, 16, 50]
    assert [evaluation.context for evaluation in evaluations] == contexts
    assert len({evaluation.n_tokens for evaluation in evaluations}) == 1
    for i, evaluation in enumerate(evaluations):
        batches = [batch for number, batch in model.evaluated if number == i]
        assert {batch["tokens"].shape for batch in batches} == {(max(1, 32 // evaluation.context), evaluation.context)}
        assert sum(int((batch["labels"] != IGNORE).sum()) for batch in batches) == evaluation.n_tokens
        assert evaluation.split == ("validation" if function == "validate" else "test")


def test_bytes_of_whole_and_limited_regions(make: Make, tokenizer: Tokenizer, documents: list[str]) -> None:
    validation = documents[0::5]
    whole = make()
    whole.setup("validate")
    [evaluation] = whole.evaluations["validate"]
    assert evaluation.n_tokens == sum(len(tokenizer.encode(text)) + 1 for text in validation) - 1
    # the region begins with a parrot, of which the first token is one byte of four
    assert evaluation.n_bytes == sum(len(text.encode()) for text in validation) - 1
    limited = make(eval_limit_tokens=20)
    limited.setup("validate")
    ids = np.array([*tokenizer.encode(validation[0]), tokenizer.end_of_text, *tokenizer.encode(validation[1])])
    [evaluation] = limited.evaluations["validate"]
    assert (evaluation.n_tokens, evaluation.n_bytes) == (20, tokenizer.count_bytes(ids[1:21]))
    generous = make(eval_limit_tokens=10**6)
    generous.setup("validate")
    assert generous.evaluations == whole.evaluations


def test_explicit_sources_replace_held_out_documents(make: Make, tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "other.txt").write_text("another text altogether, to be scored")
    other = Files([str(tmp_path / "other.txt")])
    data = make(validation=other, holdout_every=None)
    data.setup("fit")
    [evaluation] = data.evaluations["validate"]
    assert (evaluation.corpus, evaluation.split) == (other.label, "validation")
    assert evaluation.n_tokens == len(tokenizer.encode("another text altogether, to be scored"))
    data = make(validation=other)
    data.setup("fit")
    assert data.evaluations["validate"] == [evaluation]
    data.setup("test")
    assert data.evaluations["test"][0].corpus != other.label


def test_testing_on_a_source_of_its_own_reads_no_training_documents(make: Make, source: Files) -> None:
    data = make(source=Files(["nowhere/*.txt"]), test=source)
    data.prepare_data_per_node = True
    data.setup("test")
    assert data.evaluations["test"][0].n_tokens > 0


def test_regions_that_are_too_short(make: Make) -> None:
    with pytest.raises(UserError, match=r"validation: \d+ tokens to score are fewer than one window of 9999"):
        make(seq_len=9999, budget=Budget(9999, 1), holdout_every=5).setup("validate")
    with pytest.raises(UserError, match="test: 30 tokens to score are fewer than one window of 40"):
        make(eval_contexts=[10, 40], eval_limit_tokens=30).setup("test")


def test_a_region_without_documents_says_how_to_have_some(make: Make) -> None:
    with pytest.raises(UserError, match=r"test: there are no tokens to score; state a smaller data\.holdout_every"):
        make(holdout_every=10**6).setup("test")


@pytest.mark.parametrize(("stage", "field"), [("validate", "validation"), ("test", "test"), ("predict", "test")])
def test_nothing_to_evaluate_on(make: Make, stage: str, field: str) -> None:
    with pytest.raises(UserError, match=rf"nothing to {stage} on: state {field} \(a source\) or holdout_every"):
        make(holdout_every=None).setup(stage)


def test_an_evaluation_of_documents_that_stand_alone(make: Make, tmp_path: Path, tokenizer: Tokenizer) -> None:
    data, model = make(eval_document_masking=True, eval_contexts=[4, 16]), Recorder()
    trainer(tmp_path).test(model, datamodule=data)
    windows = data._evaluated.windows("test")[0]
    assert isinstance(windows, Windows)
    corpus = windows.tokens
    whole = np.asarray(corpus[: len(corpus)])
    scored_ids = whole[1:][whole[:-1] != tokenizer.end_of_text]
    for i, evaluation in enumerate(data.evaluations["test"]):
        batches = [batch for number, batch in model.evaluated if number == i]
        labels = torch.cat([batch["labels"].flatten() for batch in batches])
        assert evaluation.n_tokens == len(scored_ids) == int((labels != IGNORE).sum())
        assert evaluation.n_bytes == tokenizer.count_bytes(scored_ids)
        assert all("positions" in batch for batch in batches)


def test_what_is_left_out_has_no_loader(make: Make) -> None:
    data = make(eval_contexts=[4, 16, 50])
    data.setup("test")
    first, second, third = data.evaluations["test"]
    data.leave_out("test", [first, third])
    assert data.evaluations["test"] == [second]
    (loader,) = data.test_dataloader()
    assert {batch["tokens"].shape[1] for batch in loader} == {16}
    assert data.evaluations["predict"] == [first, second, third]
