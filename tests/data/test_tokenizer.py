"""Text goes to ids and comes back; special tokens are only ever put there on purpose."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from kvpath.data.tokenizer import Tokenizer, TokenizerConfig
from kvpath.errors import UserError

ODD = "a <|endoftext|> b\r\n\x00 🦉 naïve  \u2028end"


def test_round_trip_and_literal_special_tokens(tokenizer: Tokenizer) -> None:
    for again in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        ids = again.encode(ODD)
        assert again.end_of_text not in ids
        assert again.decode(ids) == ODD
        assert again.encode_batch([ODD, "", "x"]) == [ids, [], again.encode("x")]
    assert tokenizer.decode([*tokenizer.encode("x"), tokenizer.end_of_text], skip_special_tokens=False).endswith(
        "x<|endoftext|>"
    )


def test_an_end_of_text_that_was_not_declared_special(tokenizer: Tokenizer) -> None:
    inner = tokenizers.Tokenizer.from_str(tokenizer._inner.to_str())
    inner.add_tokens(["<eot>"])
    assert inner.token_to_id("<eot>") in inner.encode("a<eot>b").ids
    wrapped = Tokenizer(inner, "<eot>")
    assert wrapped.end_of_text not in wrapped.encode("a<eot>b")
    assert wrapped.decode(wrapped.encode("a<eot>b")) == "a<eot>b"


def test_nothing_is_cut_padded_or_added(tmp_path: Path, tokenizer: Tokenizer) -> None:
    inner = tokenizers.Tokenizer.from_str(tokenizer._inner.to_str())
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", tokenizer.end_of_text)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    loaded = TokenizerConfig(str(tmp_path)).load()
    assert loaded.encode(ODD) == tokenizer.encode(ODD)


def test_training_is_deterministic_and_cached(documents: list[str], cache: Path) -> None:
    def never() -> list[str]:
        raise AssertionError("trained again")

    config = TokenizerConfig("train", vocab_size=280)
    first = config.load(lambda: documents, "same")
    assert config.load(never, "same").fingerprint == first.fingerprint
    assert config.load(lambda: documents, "trained anew").fingerprint == first.fingerprint
    assert config.load(lambda: documents[:3], "others").fingerprint != first.fingerprint
    assert len(list((cache / "tokenizers").glob("*/tokenizer.json"))) == 3
    assert first.vocab_size == 280


def test_fingerprint_ignores_how_the_file_is_written(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path / "pretty.json")
    content = json.loads((tmp_path / "pretty.json").read_text())
    (tmp_path / "terse.json").write_text(json.dumps(content))
    for name in ("pretty.json", "terse.json"):
        assert TokenizerConfig(str(tmp_path / name)).load().fingerprint == tokenizer.fingerprint


def test_bytes_are_counted_to_the_byte(tokenizer: Tokenizer) -> None:
    ids = np.array(tokenizer.encode("🦜🦜 é" + ODD))
    assert tokenizer.count_bytes(ids) == len(("🦜🦜 é" + ODD).encode())
    assert sum(tokenizer.count_bytes(ids[i : i + 1]) for i in range(len(ids))) == tokenizer.count_bytes(ids)
    assert tokenizer.count_bytes(np.array([tokenizer.end_of_text])) == 0
    assert tokenizer.count_bytes(ids[:1]) == 1  # the first byte of a parrot


def test_bytes_of_a_tokenizer_that_is_not_byte_level() -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"é": 0, "ab": 1, "<end>": 2, "?": 3}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    assert Tokenizer(inner, "<end>").count_bytes(np.array([0, 1, 2])) == len("é ab".encode())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TokenizerConfig("train"), "vocab_size must be at least 257 .* got None"),
        (TokenizerConfig("train", 256), "vocab_size must be at least 257 .* got 256"),
        (TokenizerConfig("nowhere/tokenizer.json"), "nowhere/tokenizer.json cannot be read"),
        (TokenizerConfig("gpt2", 300), "vocab_size 300 is only for tokenizer.name: train"),
    ],
)
def test_mistakes_are_named(config: TokenizerConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config.load(lambda: ["text"])


def test_files_that_are_no_tokenizer(tmp_path: Path, tokenizer_file: str) -> None:
    for content in ("{}", "not json"):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(UserError, match="other.json is not a tokenizer.json"):
            TokenizerConfig(str(tmp_path / "other.json")).load()
    with pytest.raises(UserError, match="no token '</s>'"):
        TokenizerConfig(tokenizer_file, end_of_text="</s>").load()


@pytest.mark.parametrize("error", [FileNotFoundError("not in the cache\n"), ValueError("bad name")])
def test_a_hub_name_without_network(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def offline(name: str) -> None:
        raise error

    monkeypatch.setattr("kvpath.data.tokenizer._download", offline)
    with pytest.raises(
        UserError, match="data.tokenizer.name 'some/model' is neither a tokenizer.json here nor to be had from the Hub"
    ):
        TokenizerConfig("some/model").load()


@pytest.mark.network
def test_a_hub_name() -> None:
    assert TokenizerConfig("gpt2").load().end_of_text == 50256
