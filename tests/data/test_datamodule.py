"""What Lightning sees: one batch per optimizer step, from the step where training stands."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from kvpath.data.budget import Budget
from kvpath.data.corpus import Split, build_corpus
from kvpath.data.datamodule import PackedText
from kvpath.data.loaders import Batch
from kvpath.data.packing import IGNORE, TokenRun
from kvpath.data.sources import Files
from kvpath.data.tokenizer import Tokenizer, TokenizerConfig
from kvpath.errors import UserError
from tests.data.modules import SEQ_LEN, Make, Recorder, scored, trainer


def fit(data: PackedText, folder: Path, ckpt_path: Path | None = None, **changes: object) -> Recorder:
    model = Recorder()
    trainer(folder, **changes).fit(model, data, ckpt_path=str(ckpt_path) if ckpt_path else None)
    return model


def test_one_batch_is_one_step_and_an_epoch_is_the_run(make: Make, tmp_path: Path) -> None:
    data = make()
    model = fit(data, tmp_path)
    assert data.plan.steps == 8
    assert [tuple(tokens.shape) for tokens in model.trained] == [(2, 2, SEQ_LEN)] * 8
    assert model.trainer.global_step == 8
    assert model.trainer.num_training_batches == 8
    assert model.trainer.current_epoch == 1
    expected = [batch["tokens"] for batch in outside_lightning(data)]
    assert torch.equal(torch.stack(model.trained), torch.stack(expected))
    assert [evaluation.context for evaluation in data.evaluations["validate"]] == [SEQ_LEN]
    assert scored(model) == data.evaluations["validate"][0].n_tokens * 2  # a batch of the sanity check comes on top


def outside_lightning(data: PackedText) -> list[Batch]:
    data.trainer = None
    data.setup("fit")
    return list(data.train_dataloader())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "num_workers"), [(1, 0), (3, 2), (7, 0)])
def test_a_resume_goes_on_where_it_stopped(
    make: Make, tmp_path: Path, stop: int, stream: bool, num_workers: int
) -> None:
    arguments = {"stream": stream, "num_workers": num_workers, "eval_limit_tokens": 40}
    whole = fit(make(**arguments), tmp_path / "whole")
    first = fit(
        make(**arguments),
        tmp_path / "first",
        max_steps=stop,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(tmp_path / "first", filename="at", every_n_train_steps=stop)],
    )
    rest = fit(make(**arguments), tmp_path / "rest", ckpt_path=tmp_path / "first" / "at.ckpt")
    assert len(rest.trained) == 8 - stop
    assert torch.equal(torch.stack(first.trained + rest.trained), torch.stack(whole.trained))
    assert torch.equal(rest.weight, whole.weight)


def test_a_resume_in_the_middle_warns_of_nothing(make: Make, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    save = ModelCheckpoint(tmp_path, filename="at", every_n_train_steps=3)
    fit(make(), tmp_path, max_steps=3, enable_checkpointing=True, callbacks=[save])
    fit(make(), tmp_path, ckpt_path=tmp_path / "at.ckpt")
    assert not [warning for warning in recwarn if "not resumable" in str(warning.message)]


def test_limited_epochs_go_on_and_repeat_nothing(make: Make, tmp_path: Path) -> None:
    whole = fit(make(), tmp_path)
    limited = fit(make(), tmp_path, limit_train_batches=3)
    assert limited.trainer.current_epoch == 3
    assert torch.equal(torch.stack(limited.trained), torch.stack(whole.trained))


def test_a_limited_epoch_resumes_in_its_middle(make: Make, tmp_path: Path) -> None:
    whole = fit(make(), tmp_path)
    save = ModelCheckpoint(tmp_path, filename="at", every_n_train_steps=5)
    first = fit(make(), tmp_path, max_steps=5, limit_train_batches=3, enable_checkpointing=True, callbacks=[save])
    rest = fit(make(), tmp_path, ckpt_path=tmp_path / "at.ckpt", limit_train_batches=3)
    assert torch.equal(torch.stack(first.trained + rest.trained), torch.stack(whole.trained))


@pytest.mark.parametrize("overfit_batches", [2, 0.25])
@pytest.mark.parametrize("stream", [False, True])
def test_overfitting_repeats_the_first_steps(make: Make, tmp_path: Path, overfit_batches: float, stream: bool) -> None:
    # small evaluation batches, because overfit_batches is a share of those too
    arguments = {"stream": stream, "eval_limit_tokens": 40, "eval_batch_tokens": SEQ_LEN}
    whole = fit(make(**arguments), tmp_path)
    model = fit(make(**arguments), tmp_path, overfit_batches=overfit_batches, max_steps=6)
    assert torch.equal(torch.stack(model.trained), torch.stack(whole.trained[:2] * 3))


def test_fast_dev_run(make: Make, tmp_path: Path) -> None:
    assert len(fit(make(), tmp_path, fast_dev_run=True).trained) == 1


def test_no_validation_is_fine_in_fit(make: Make, tmp_path: Path) -> None:
    model = fit(make(holdout_every=None), tmp_path)
    assert len(model.trained) == 8
    assert model.evaluated == []


def test_the_stream_leaves_out_held_out_documents(make: Make, source: Files, tokenizer: Tokenizer) -> None:
    data = make(stream=True, lanes=1, eval_limit_tokens=40)
    data.setup("fit")
    tokens = torch.cat([batch["tokens"].flatten() for batch in data.train_dataloader()])
    region = build_corpus(source, tokenizer, Split(5))["train"].tokens[:].astype("int64")
    assert torch.equal(tokens, torch.from_numpy(region)[: len(tokens)])
    assert data.evaluations["validate"][0].n_tokens == 40


def test_a_tokenizer_trained_on_training_documents_alone(make: Make, source: Files, documents: list[str]) -> None:
    data = make(tokenizer=TokenizerConfig("train", vocab_size=280))
    data.prepare_data()
    data.setup("fit")
    training = [text for i, text in enumerate(documents) if i % 5 not in (0, 2)]
    expected = TokenizerConfig("train", vocab_size=280).load(lambda: training, "directly")
    assert data.tokenizer.fingerprint == expected.fingerprint


def test_a_corpus_that_is_too_short(make: Make, source: Files) -> None:
    with pytest.raises(UserError, match="training tokens are fewer than one window: seq_len 9999 needs 10000"):
        make(seq_len=9999, budget=Budget(9999, 1)).setup("fit")
    with pytest.raises(UserError, match="training tokens are fewer than one optimizer step: it needs 32001"):
        make(budget=Budget(10**6, 4000)).setup("fit")
    with pytest.raises(UserError, match="training tokens are fewer than one window"):
        make(source=replace(source, max_documents=1)).setup("fit")


def corpus_of(data: PackedText) -> TokenRun:
    found: TokenRun = data._corpora("fit", data.tokenizer)["train"].tokens
    return found


def tokens_of(data: PackedText) -> Tensor:
    data.setup("fit")
    return torch.cat([batch["tokens"].flatten() for batch in data.train_dataloader()])


@pytest.mark.parametrize("stream", [False, True])
def test_stages_go_on_in_one_stream_of_tokens(make: Make, stream: bool) -> None:
    common = {"shuffle_block": 32, "stream": stream, "lanes": 1, "eval_limit_tokens": 40}
    whole = tokens_of(make(**common, budget=Budget(512, global_batch_tokens=32)))
    for seq_len, start in ((4, 100), (8, 96), (16, 64), (32, 224)):
        later = make(**common, seq_len=seq_len, start_tokens=start, budget=Budget(128, global_batch_tokens=32))
        assert torch.equal(tokens_of(later), whole[start : start + 128])


def test_a_stage_begins_with_a_whole_window(make: Make) -> None:
    common = {"shuffle_block": 32, "budget": Budget(128, global_batch_tokens=32)}
    assert torch.equal(tokens_of(make(**common, start_tokens=17)), tokens_of(make(**common, start_tokens=24)))


def test_one_epoch_of_whole_blocks_reads_nothing_twice(make: Make) -> None:
    data = make(shuffle_block=160, budget=Budget(None, global_batch_sequences=1), repeat=False)
    tokens = tokens_of(data)
    n = data._training_windows.n_windows * SEQ_LEN // 160 * 160
    assert n < data._training_windows.n_windows * SEQ_LEN
    assert len(tokens) == n
    region = torch.from_numpy(corpus_of(data)[0:n].astype("int64"))
    assert torch.equal(tokens.sort().values, region.sort().values)


def test_a_corpus_that_ends_before_the_budget_is_refused_with_the_numbers(make: Make) -> None:
    available = 160 * ((make_windows(make) * SEQ_LEN) // 160)
    enough = Budget(available - 160, global_batch_tokens=160)
    assert len(tokens_of(make(shuffle_block=160, budget=enough, start_tokens=160, repeat=False))) == available - 160
    for start, left in ((320, available - 320), (available + 800, 0)):
        data = make(shuffle_block=160, budget=enough, start_tokens=start, repeat=False)
        message = (
            f"ends before data.budget.tokens {available - 160}: an epoch has {available}, of which {left} are left"
            f" after data.start_tokens {start}; data.repeat: true begins a second epoch"
        )
        with pytest.raises(UserError, match=message):
            data.setup("fit")
        assert len(tokens_of(make(shuffle_block=160, budget=enough, start_tokens=start))) == available - 160


def make_windows(make: Make) -> int:
    data = make()
    data.setup("fit")
    return data._training_windows.n_windows


def test_a_block_that_the_corpus_does_not_fill(make: Make) -> None:
    with pytest.raises(UserError, match=r"its \d+ training tokens are fewer than one shuffle_block of 80000"):
        make(shuffle_block=80000).setup("fit")


def test_yaml_makes_it_and_the_saved_yaml_makes_it_again(source: Files, tokenizer_file: str) -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(PackedText, "data")
    yaml = f"""
data:
  class_path: PackedText
  init_args:
    source: {{class_path: Files, init_args: {{files: [{source.files[0]}]}}}}
    validation: {{class_path: Files, init_args: {{files: [{source.files[0]}], max_documents: 10}}}}
    tokenizer: {{name: {tokenizer_file}}}
    seq_len: 8
    budget: {{tokens: 1e3, global_batch_tokens: 64, micro_batch: 4}}
"""
    first = parser.instantiate_classes(parser.parse_string(yaml)).data
    again = parser.instantiate_classes(parser.parse_string(parser.dump(parser.parse_string(yaml)))).data
    for data in (first, again):
        data.setup("fit")
        assert data.plan == Budget(1000, 8, micro_batch=4).plan(8, 1)
        assert next(iter(data.train_dataloader()))["tokens"].shape == (2, 4, 8)
    assert first.evaluations == again.evaluations


def test_documents_that_stand_alone(make: Make, tokenizer: Tokenizer) -> None:
    plain, alone = make(), make(document_masking=True)
    for data in (plain, alone):
        data.setup("fit")
    for before, batch in zip(plain.train_dataloader(), alone.train_dataloader(), strict=True):
        assert torch.equal(batch["tokens"], before["tokens"])
        assert batch["documents"].shape == batch["positions"].shape == before["tokens"].shape == (2, 2, SEQ_LEN)
        ends = batch["tokens"] == tokenizer.end_of_text
        assert torch.equal(batch["labels"], before["labels"].masked_fill(ends, IGNORE))
        assert torch.equal(batch["documents"][..., 1:], ends.cumsum(-1)[..., :-1])
    # an evaluation scores every token whatever the training was, unless asked
    assert alone.evaluations == plain.evaluations
    assert "documents" not in next(iter(alone.val_dataloader()[0]))


def test_best_fit_reads_every_token_once_an_epoch(make: Make) -> None:
    data = make(packing="best_fit", packing_documents=6, budget=Budget(None, global_batch_sequences=1))
    tokens = tokens_of(data)
    corpus = torch.from_numpy(corpus_of(data)[:].astype("int64"))
    assert data.plan.steps == data._training_windows.n_windows
    n_padding = len(tokens) - len(corpus)
    assert 0 <= n_padding < 0.2 * len(corpus)
    padded = torch.cat([corpus, torch.zeros(n_padding, dtype=torch.int64)])
    assert torch.equal(tokens.sort().values, padded.sort().values)


def test_ranks_and_workers_that_do_not_divide_the_lanes(make: Make) -> None:
    with pytest.raises(UserError, match="data.lanes 16 cannot be dealt to 1 ranks x 3 workers = 3"):
        make(stream=True, eval_limit_tokens=40, num_workers=3).setup("fit")
    make(num_workers=3).setup("fit")
