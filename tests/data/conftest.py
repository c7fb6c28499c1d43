"""A small corpus, the tokenizer trained on it, a data module of both, and a cache for each test."""

import json
import random
from pathlib import Path

import pytest

from kvpath.data.budget import Budget
from kvpath.data.datamodule import PackedText
from kvpath.data.sources import Files
from kvpath.data.tokenizer import Tokenizer, TokenizerConfig
from tests.data.modules import SEQ_LEN, Make

WORDS = ["key", "value", "path", "alpha", "delta", "the", "of", "owl 🦉", "naïve", "\n", "<|endoftext|>", "1,024"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVPATH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def documents() -> list[str]:
    """40 documents of different lengths, one of them empty, two that begin inside a character for most tokenizers."""
    choose = random.Random(0)
    documents = [" ".join(choose.choices(WORDS, k=5 + 3 * (i % 7))) for i in range(40)]
    documents[0] = documents[4] = "🦜" + documents[0]
    documents[9] = ""
    return documents


@pytest.fixture
def source(tmp_path: Path, documents: list[str]) -> Files:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    return Files([str(path)])


@pytest.fixture
def tokenizer(documents: list[str]) -> Tokenizer:
    return TokenizerConfig("train", vocab_size=280).load(lambda: documents, "documents")


@pytest.fixture
def tokenizer_file(tmp_path: Path, tokenizer: Tokenizer) -> str:
    tokenizer.save(tmp_path / "tokenizer.json")
    return str(tmp_path / "tokenizer.json")


@pytest.fixture
def make(source: Files, tokenizer_file: str) -> Make:
    def make(**changes: object) -> PackedText:
        arguments: dict[str, object] = {
            "source": source,
            "tokenizer": TokenizerConfig(tokenizer_file),
            "seq_len": SEQ_LEN,
            "budget": Budget(8 * 4 * SEQ_LEN, global_batch_sequences=4, micro_batch=2),
            "holdout_every": 5,
        }
        return PackedText(**{**arguments, **changes})  # type: ignore[arg-type]

    return make
