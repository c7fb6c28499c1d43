"""What is tokenised once: whole, in the right regions, found again, never half-made."""

import json
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvpath.data.corpus import Split, TokenCorpus, build_corpus, in_batches
from kvpath.data.sources import Files
from kvpath.data.tokenizer import Tokenizer
from kvpath.errors import UserError

SCRIPT = """
import sys
from pathlib import Path
from kvpath.data.corpus import Split, build_corpus
from kvpath.data.sources import Files
from kvpath.data.tokenizer import TokenizerConfig
tokenizer = TokenizerConfig(sys.argv[1]).load()
{before}
print(build_corpus(Files([sys.argv[2]]), tokenizer, Split(4))["train"].manifest.n_tokens)
"""


def texts_of(corpus: TokenCorpus, tokenizer: Tokenizer) -> list[str]:
    starts = corpus.offsets[:]
    ids = [corpus.tokens[int(start) : int(end)] for start, end in zip(starts, starts[1:], strict=False)]
    assert all(document[-1] == tokenizer.end_of_text for document in ids)
    return [tokenizer.decode(document[:-1].tolist()) for document in ids]


def test_regions_are_disjoint_complete_and_in_order(source: Files, tokenizer: Tokenizer, documents: list[str]) -> None:
    corpora = build_corpus(source, tokenizer, Split(7))
    expected = {
        "validation": [text for i, text in enumerate(documents) if i % 7 == 0],
        "test": [text for i, text in enumerate(documents) if i % 7 == 3],
        "train": [text for i, text in enumerate(documents) if i % 7 not in (0, 3)],
    }
    assert set(corpora) == set(expected)
    for region, corpus in corpora.items():
        assert texts_of(corpus, tokenizer) == expected[region]
        assert list(Split(7).documents(source, region)) == expected[region]
        assert corpus.manifest.n_documents == len(expected[region])
        assert corpus.manifest.n_bytes == sum(len(text.encode()) for text in expected[region])
        assert corpus.manifest.n_tokens == len(corpus.tokens) == len(corpus.tokens[:]) == corpus.offsets[:][-1]
        assert corpus.tokens[:1].dtype == np.uint16


def test_bad_documents_are_skipped_and_said(
    source: Files, tokenizer: Tokenizer, documents: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with Path(source.files[0]).open("ab") as file:
        file.write(b'{"text": "\xff"}\n{"no text": 1}\nnot JSON\n{"text": "good"}\n')
    with pytest.raises(UserError, match="is not UTF-8: byte"):
        build_corpus(source, tokenizer, Split())
    corpus = build_corpus(replace(source, bad_documents="skip"), tokenizer, Split())["train"]
    assert texts_of(corpus, tokenizer) == [*documents, "good"]
    assert capsys.readouterr().err == f"{source.label}: 3 documents could not be decoded: skipped\n"


def test_without_held_out_documents_all_are_of_one_region(source: Files, tokenizer: Tokenizer) -> None:
    corpora = build_corpus(source, tokenizer, Split(rest="validation"))
    assert list(corpora) == ["validation"]
    assert corpora["validation"].manifest.n_documents == 40


def test_held_out_documents_alone_as_far_as_needed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text('{"text": "some words"}\n' * 5000)
    split = Split(10, rest=None, limit_tokens=20)
    corpora = build_corpus(Files([str(path)]), tokenizer, split)
    assert list(corpora) == ["validation", "test"]
    for corpus in corpora.values():
        assert corpus.manifest.n_tokens >= 20
        assert corpus.manifest.n_documents < 500


def test_the_second_time_no_document_is_read(
    source: Files, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_corpus(source, tokenizer, Split(4))
    monkeypatch.setattr(Files, "numbered", lambda self: pytest.fail("read again"))
    again = build_corpus(source, tokenizer, Split(4))
    assert again["train"].directory == first["train"].directory


def test_all_that_decides_the_tokens_decides_the_place(source: Files, tokenizer: Tokenizer, tmp_path: Path) -> None:
    def place(source: Files, split: Split) -> Path:
        return build_corpus(source, tokenizer, split, tmp_path / "here")["train"].directory

    places = {place(source, Split(4)), place(source, Split(5)), place(replace(source, max_documents=9), Split(4))}
    Path(source.files[0]).write_text(json.dumps({"text": "changed"}))
    places.add(place(source, Split(4)))
    assert len(places) == 4
    assert all(path.is_relative_to(tmp_path / "here") for path in places)


def test_large_vocabularies_take_four_bytes(source: Files, tokenizer: Tokenizer, tmp_path: Path) -> None:
    small = build_corpus(source, tokenizer, Split())["train"]
    # the computed size is kept there: the same tokenizer, as if it were large
    tokenizer.__dict__["vocab_size"] = 2**16
    large = build_corpus(source, tokenizer, Split(), tmp_path / "other")["train"]
    assert (small.manifest.dtype, large.manifest.dtype) == ("uint16", "uint32")
    assert np.array_equal(small.tokens[:], large.tokens[:])


def test_a_pickled_corpus_maps_its_file_anew(source: Files, tokenizer: Tokenizer) -> None:
    corpus = build_corpus(source, tokenizer, Split())["train"]
    whole = corpus.tokens[:].copy()
    content = pickle.dumps(corpus.tokens)
    assert len(content) < 500 < whole.nbytes
    assert np.array_equal(pickle.loads(content)[:], whole)


def test_an_empty_region_is_no_error_yet(source: Files, tokenizer: Tokenizer) -> None:
    corpora = build_corpus(replace(source, max_documents=1), tokenizer, Split(4))
    assert corpora["train"].manifest.n_tokens == len(corpora["train"].tokens[:]) == 0


def test_batches_are_bounded_by_number_and_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpath.data.corpus._BATCH_DOCUMENTS", 3)
    monkeypatch.setattr("kvpath.data.corpus._BATCH_CHARACTERS", 10)
    texts = ["a", "b", "c", "d" * 10, "e", "f" * 9, "g"]
    assert list(in_batches(texts)) == [["a", "b", "c"], ["d" * 10], ["e", "f" * 9], ["g"]]


@pytest.mark.parametrize("holdout_every", [0, 1, 2, -5])
def test_a_split_needs_room_for_three(holdout_every: int) -> None:
    with pytest.raises(UserError, match=f"holdout_every must be at least 3 .* got {holdout_every}"):
        Split(holdout_every)


def test_damage_is_noticed(source: Files, tokenizer: Tokenizer, tmp_path: Path) -> None:
    corpus = build_corpus(source, tokenizer, Split())["train"]
    manifest = corpus.directory / "manifest.json"
    with (corpus.directory / "tokens.bin").open("ab") as file:
        file.truncate(7)
    with pytest.raises(UserError, match="tokens.bin has 7 bytes, not .*: the corpus is damaged; delete"):
        build_corpus(source, tokenizer, Split())
    manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(UserError, match="has format_version 2, this kvpath reads 1"):
        TokenCorpus(corpus.directory)
    with pytest.raises(UserError, match="is not a tokenised corpus"):
        TokenCorpus(tmp_path)


def run(script: str, *arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", script, *arguments], env=environment, stdout=-1, text=True)


def test_two_processes_make_one_corpus(source: Files, tokenizer_file: str, cache: Path) -> None:
    script = SCRIPT.format(before="")
    outputs = [process.communicate()[0] for process in [run(script, tokenizer_file, *source.files) for _ in range(2)]]
    assert outputs[0] == outputs[1]
    assert int(outputs[0]) > 100
    assert len([path for path in (cache / "corpora").iterdir() if path.is_dir()]) == 1


def test_a_killed_build_is_made_again(source: Files, tokenizer: Tokenizer, tokenizer_file: str, cache: Path) -> None:
    kill = """
import os, signal
from kvpath.data import corpus
add = corpus._Writer.add
def add_and_die(self, text, ids):
    add(self, text, ids)
    if self.n_documents == 5:
        os.kill(os.getpid(), signal.SIGKILL)
corpus._Writer.add = add_and_die
"""
    process = run(SCRIPT.format(before=kill), tokenizer_file, *source.files)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert [path.suffix for path in (cache / "corpora").iterdir() if path.is_dir()] == [".part"]
    assert build_corpus(source, tokenizer, Split(4))["train"].manifest.n_documents == 20
    assert not list((cache / "corpora").glob("*.part"))
