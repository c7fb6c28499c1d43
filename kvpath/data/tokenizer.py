"""Text to token ids and back."""

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from kvpath.data.cache import build_once, cache_dir, digest, write_atomically
from kvpath.errors import UserError

_N_BYTES = 256
_FILE = "tokenizer.json"


class Tokenizer:
    """A ``tokenizers.Tokenizer`` that never cuts, pads or adds anything, and reads all text as text.

    A document that spells the end-of-text token, or any other special token, is encoded like any other characters.

    Args:
        inner: changed in place to behave so.
        end_of_text: the token put after each document.

    Raises:
        UserError: if ``inner`` has no such token.
    """

    def __init__(self, inner: tokenizers.Tokenizer, end_of_text: str) -> None:
        token = inner.token_to_id(end_of_text)
        if token is None:
            raise UserError(f"tokenizer.end_of_text: this tokenizer has no token {end_of_text!r}")
        inner.no_truncation()
        inner.no_padding()
        # only tokens that are declared special can be kept from matching text
        inner.add_special_tokens([end_of_text])
        inner.encode_special_tokens = True
        self._inner = inner
        self.end_of_text: int = token
        """The id of the end-of-text token."""
        self.end_of_text_token = end_of_text

    def __reduce__(self) -> tuple[Callable[..., "Tokenizer"], tuple[str, str]]:
        # encode_special_tokens is lost when the inner tokenizer is pickled
        return _from_json, (self._inner.to_str(), self.end_of_text_token)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return 1 + max(self._inner.get_vocab(with_added_tokens=True).values())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer's canonical JSON and of which token ends a text."""
        return digest(json.loads(self._inner.to_str()), self.end_of_text_token)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, nothing added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, nothing added."""
        return [encoding.ids for encoding in self._inner.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_joined(self, texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Tokens of all texts in a row, the end-of-text token after each; and how many each text has, that included."""
        joined, lengths = array("I"), []
        for encoding in self._inner.encode_batch_fast(texts, add_special_tokens=False):
            ids = encoding.ids
            ids.append(self.end_of_text)
            joined.fromlist(ids)
            lengths.append(len(ids))
        return np.frombuffer(joined, dtype=np.uint32), np.array(lengths, dtype=np.int64)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``."""
        return self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def count_bytes(self, ids: NDArray[np.integer]) -> int:
        """UTF-8 bytes of the text that ``ids`` stand for, special tokens not counted.

        Exact for byte-level tokenizers, even where a token ends inside a character; else the length of the decoding.
        """
        if self._bytes_per_id is None:
            return len(self.decode(ids.tolist()).encode())
        return int(self._bytes_per_id[np.asarray(ids, dtype=np.int64)].sum())

    @cached_property
    def _bytes_per_id(self) -> NDArray[np.int64] | None:
        if not isinstance(self._inner.decoder, decoders.ByteLevel):
            return None
        table = np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in self._inner.get_vocab(with_added_tokens=False).items():
            table[i] = len(token)  # byte-level vocabularies spell each byte as one character
        for i, added in self._inner.get_added_tokens_decoder().items():
            table[i] = 0 if added.special else len(added.content.encode())
        return table

    def save(self, path: Path) -> None:
        """Write a ``tokenizer.json``, whole or not at all."""
        write_atomically(path, self._inner.to_str(pretty=True).encode())


@dataclass
class TokenizerConfig:
    """Which tokenizer.

    Args:
        name: a name on the Hugging Face Hub, a ``tokenizer.json`` (or a folder with one), or ``train``: a byte-level
            BPE trained on the training documents once and then kept in the cache. Prepared shards have theirs beside
            them, and take ``train``, or the name it had when they were made, for that.
        vocab_size: entries of a trained tokenizer, at least 257. Only for ``train``.
        end_of_text: the token put after each document; it has to be in the vocabulary.
    """

    name: str = "train"
    vocab_size: int | None = None
    end_of_text: str = "<|endoftext|>"

    @property
    def is_trained_here(self) -> bool:
        """Whether the training documents decide the tokenizer."""
        return self.name == "train"

    def load(self, documents: Callable[[], Iterable[str]] | None = None, documents_fingerprint: str = "") -> Tokenizer:
        """The tokenizer; ``documents`` (the training documents) are only read to train one that is not cached yet.

        Raises:
            UserError: names the field and what is wrong.
        """
        if self.is_trained_here:
            return self._trained(documents, documents_fingerprint)
        if self.vocab_size is not None:
            raise UserError(f"tokenizer.vocab_size {self.vocab_size} is only for tokenizer.name: train; drop it")
        path = Path(self.name).expanduser()
        if path.is_dir():
            path = path / _FILE
        if path.suffix == ".json" or path.is_file():
            return _from_file(path, self.end_of_text)
        return Tokenizer(_from_hub(self.name), self.end_of_text)

    def _trained(self, documents: Callable[[], Iterable[str]] | None, documents_fingerprint: str) -> Tokenizer:
        if self.vocab_size is None or self.vocab_size <= _N_BYTES:
            raise UserError(
                f"tokenizer.vocab_size must be at least {_N_BYTES + 1} (256 bytes and the end-of-text token) "
                f"for tokenizer.name: train, got {self.vocab_size}"
            )
        if documents is None:
            raise UserError("tokenizer.name: train needs training documents; name a tokenizer.json instead")
        key = digest("byte-level BPE", self.vocab_size, self.end_of_text, documents_fingerprint)

        def build(directory: Path) -> None:
            trained = _train(documents(), self.vocab_size or 0, self.end_of_text)
            Tokenizer(trained, self.end_of_text).save(directory / _FILE)

        return _from_file(build_once(cache_dir() / "tokenizers" / key[:32], build) / _FILE, self.end_of_text)


def _train(documents: Iterable[str], vocab_size: int, end_of_text: str) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_of_text],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(documents, trainer)
    return inner


def _from_file(path: Path, end_of_text: str) -> Tokenizer:
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"tokenizer.name: {path} cannot be read: {error}") from error
    return _from_json(content, end_of_text, str(path))


def _from_json(content: str, end_of_text: str, where: str = "tokenizer") -> Tokenizer:
    try:
        inner = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the library raises nothing more specific
        raise UserError(f"tokenizer.name: {where} is not a tokenizer.json: {error}") from error
    return Tokenizer(inner, end_of_text)


_download = tokenizers.Tokenizer.from_pretrained


def _from_hub(name: str) -> tokenizers.Tokenizer:
    # everything the Hub's client raises for a wrong name or without network is one of these
    try:
        return _download(name)
    except (OSError, ValueError) as error:
        raise UserError(
            f"data.tokenizer.name {name!r} is neither a tokenizer.json here nor to be had from the Hub: "
            f"{' '.join(str(error).split())}"
        ) from error
