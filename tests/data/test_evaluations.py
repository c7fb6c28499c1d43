"""What is evaluated on: texts by name, and a fingerprint that is the same for everyone who reads the same."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpath.data.budget import Budget
from kvpath.data.datamodule import PackedText
from kvpath.data.evaluations import EvaluatedText, fingerprint_of
from kvpath.data.packing import IGNORE
from kvpath.data.sources import Files
from kvpath.data.tokenizer import Tokenizer, TokenizerConfig
from kvpath.errors import UserError


def module(text: Files, tokenizer_file: str, **changes: object) -> PackedText:
    plain: dict[str, object] = {"source": Files(["nowhere/*.txt"]), "tokenizer": TokenizerConfig(tokenizer_file)}
    plain |= {"seq_len": 8, "budget": Budget(64, 1), "evaluate": {"mine": EvaluatedText(text)}}
    return PackedText(**{**plain, **changes})  # type: ignore[arg-type]


def test_texts_are_scored_whole_whatever_the_context_and_stride(
    source: Files, tokenizer: Tokenizer, tokenizer_file: str, documents: list[str]
) -> None:
    texts = {"all": EvaluatedText(source), "held": EvaluatedText(source, "validation", 5, limit_tokens=40)}
    ids = [[*tokenizer.encode(text), tokenizer.end_of_text] for text in documents]
    whole = {"all": sum(ids, []), "held": sum(ids[::5], [])[:41]}
    for stride in (None, 3):
        data = module(source, tokenizer_file, evaluate=texts, eval_contexts=[4, 16], eval_stride=stride)
        data.setup("test")
        found = data.evaluations["test"]
        assert [(one.corpus, one.context, one.stride) for one in found] == [
            (name, context, stride or context) for name in texts for context in (4, 16)
        ]
        assert {one.split for one in found if one.corpus == "held"} == {"validation"}
        for one, loader in zip(found, data.test_dataloader(), strict=True):
            labels = np.concatenate([batch["labels"].numpy().ravel() for batch in loader])
            expected = whole[one.corpus]
            assert labels[labels != IGNORE].tolist() == expected[1:]
            assert one.n_tokens == len(expected) - 1
            assert one.n_bytes == tokenizer.count_bytes(np.array(expected[1:]))
            assert one.fingerprint == fingerprint_of(np.array(expected), tokenizer)


def test_validation_neither_slides_nor_reads_those_texts(source: Files, tokenizer_file: str) -> None:
    lost = {"lost": EvaluatedText(Files(["nowhere/*.txt"]))}
    data = module(source, tokenizer_file, source=source, holdout_every=5, evaluate=lost, eval_stride=2)
    data.prepare_data()
    data.setup("fit")
    (evaluation,) = data.evaluations["validate"]
    assert (evaluation.context, evaluation.stride) == (8, 8)


def test_a_fingerprint_is_of_what_is_read_and_not_of_how_it_is_kept(tokenizer: Tokenizer) -> None:
    tokens = np.array([5, 6, tokenizer.end_of_text, 7], dtype=np.uint16)
    found = fingerprint_of(tokens, tokenizer)
    assert len(bytes.fromhex(found)) == 32
    assert fingerprint_of(tokens.astype(np.uint32), tokenizer) == found
    assert fingerprint_of(tokens.astype(np.int64), tokenizer) == found
    other_end = TokenizerConfig("train", vocab_size=281).load(lambda: ["another"], "other")
    others = [
        fingerprint_of(np.array([5, tokenizer.end_of_text, 6, 7]), tokenizer),
        fingerprint_of(tokens[:-1], tokenizer),
        fingerprint_of(tokens, other_end),
        fingerprint_of(tokens, tokenizer, documents_alone=True),
    ]
    assert len({found, *others}) == 5


class Counted(Files):
    """Counts the documents that were asked for."""

    read = 0

    def numbered(self) -> Iterator[tuple[int, str]]:
        for pair in super().numbered():
            self.read += 1
            yield pair


@pytest.mark.parametrize("holdout_every", [None, 5])
def test_no_more_is_read_than_the_limit_needs(
    source: Files,
    tokenizer: Tokenizer,
    documents: list[str],
    holdout_every: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvpath.data.corpus._BATCH_DOCUMENTS", 4)
    counted = Counted(source.files)
    corpus = EvaluatedText(counted, "test", holdout_every, limit_tokens=60).corpus("mine", tokenizer)
    assert corpus.manifest.n_tokens > 60
    assert counted.read < len(documents)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate": {}}, "evaluate must name at least one text, or be null, got {}"),
        (
            {"evaluate": {"a": EvaluatedText(Files(["x"]), holdout_every=2, limit_tokens=0)}},
            "evaluate.a.holdout_every must be at least 3, got 2; evaluate.a.limit_tokens must be at least 1, got 0",
        ),
        ({"eval_stride": 0}, r"eval_stride must be from 1 to the shortest of eval_contexts [8], got 0"),
        ({"eval_stride": 9}, r"eval_stride must be from 1 to the shortest of eval_contexts [8], got 9"),
    ],
)
def test_bad_arguments(source: Files, tokenizer_file: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as refused:
        module(source, tokenizer_file, **changes)
    assert str(refused.value) == message


def test_all_texts_that_are_too_short_are_named(source: Files, tokenizer_file: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("the key")
    short = EvaluatedText(Files([str(tmp_path / "short.txt")]))
    texts = {"a": short, "mine": EvaluatedText(source), "b": short}
    data = module(source, tokenizer_file, evaluate=texts, eval_contexts=[2, 64])
    with pytest.raises(
        UserError, match=r"^a, test: 3 tokens to score are fewer than one window of 64; .*; b, test: 3 "
    ):
        data.setup("test")


def test_a_text_that_cannot_be_read_is_named(source: Files, tokenizer_file: str) -> None:
    data = module(source, tokenizer_file, evaluate={"lost": EvaluatedText(Files(["nowhere/*.txt"]))})
    with pytest.raises(UserError, match=r"^data\.evaluate\.lost: .*nowhere"):
        data.setup("test")


def test_another_tokenizer_than_that_of_the_weights_is_refused(source: Files, tokenizer_file: str) -> None:
    data = module(source, tokenizer_file)
    data.tokenizer_of_weights = "another"
    with pytest.raises(UserError, match=rf"data\.tokenizer '{tokenizer_file}' is not the one that the checkpoint"):
        data.setup("test")
    data.tokenizer_of_weights = data.load_tokenizer().fingerprint
    data.setup("test")
