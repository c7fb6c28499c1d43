"""A source tokenised once: for each region of it, one file of tokens that is mapped into memory."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm  # type: ignore[import-untyped]

from kvpath.data.cache import build_once, cache_dir, digest, write_atomically
from kvpath.data.mapped import MappedArray
from kvpath.data.regions import Manifest, Region, Split, dtype_of
from kvpath.data.sources import Source
from kvpath.data.tokenizer import Tokenizer
from kvpath.errors import UserError

FORMAT_VERSION = 1

_NUMBERING = "by part"
"""How documents get the numbers that hold some of them out: part of what decides a corpus."""

_MANIFEST, _TOKENS, _OFFSETS = "manifest.json", "tokens.bin", "offsets.bin"
_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 4 * 2**20
_T = TypeVar("_T")


class TokenCorpus:
    """One region, tokenised: ``tokens`` (n_tokens,), ``offsets`` (n_documents + 1,) and the counts in ``manifest``.

    Document i is ``tokens[offsets[i]:offsets[i + 1]]``, its end-of-text token included.

    Raises:
        UserError: if the directory is not a whole corpus that this version can read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            found = json.loads((directory / _MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{directory} is not a tokenised corpus: {error}") from error
        if found.get("format_version") != FORMAT_VERSION:
            raise UserError(
                f"{directory} has format_version {found.get('format_version')}, this kvpath reads {FORMAT_VERSION}"
            )
        self.manifest = Manifest(**found)
        self.tokens = MappedArray(directory / _TOKENS, self.manifest.dtype, self.manifest.n_tokens)
        self.offsets = MappedArray(directory / _OFFSETS, np.uint64, self.manifest.n_documents + 1)
        self._check_size(_TOKENS, self.manifest.n_tokens * np.dtype(self.manifest.dtype).itemsize)
        self._check_size(_OFFSETS, (self.manifest.n_documents + 1) * np.dtype(np.uint64).itemsize)

    def _check_size(self, name: str, expected: int) -> None:
        path = self.directory / name
        size = path.stat().st_size if path.exists() else 0
        if size != expected:
            raise UserError(
                f"{path} has {size} bytes, not {expected}: the corpus is damaged; delete {self.directory.parent}"
            )


def build_corpus(
    source: Source, tokenizer: Tokenizer, split: Split, directory: Path | None = None
) -> dict[Region, TokenCorpus]:
    """Tokenise ``source`` once, or find that it was done: a corpus for each region of ``split``.

    Args:
        source: its documents; nothing of it but the fingerprint is read if the result is there already.
        tokenizer: what makes tokens of them.
        split: which document belongs to which region.
        directory: where to keep it; by default in our cache. Inside, a folder named by a hash of all that determines
            the tokens.

    Raises:
        UserError: for what the source cannot read, or no disk space.
    """
    source_fingerprint = source.fingerprint()
    key = digest(FORMAT_VERSION, _NUMBERING, source_fingerprint, tokenizer.fingerprint, dataclasses.asdict(split))
    dtype = dtype_of(tokenizer.vocab_size)

    def build(target: Path) -> None:
        with ExitStack() as files:
            writers = {}
            for region in split.regions:
                empty = Manifest(
                    FORMAT_VERSION, source_fingerprint, tokenizer.fingerprint, source.label, region, dtype, 0, 0, 0
                )
                writers[region] = _Writer(target / region, empty, files)
            _tokenise(source, tokenizer, split, writers)
            for writer in writers.values():
                writer.finish()

    target = build_once((directory or cache_dir() / "corpora") / key[:32], build)
    return {region: TokenCorpus(target / region) for region in split.regions}


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> list[NDArray[np.int64]]:
    """Tokens of each text, with the end-of-text token after it."""
    return [np.array([*ids, tokenizer.end_of_text], dtype=np.int64) for ids in tokenizer.encode_batch(texts)]


def in_batches(
    documents: Iterable[_T], text_of: Callable[[_T], str] = str, most_characters: int | None = None
) -> Iterator[list[_T]]:
    """Lists that are large enough to tokenise at speed and small enough to hold.

    Args:
        documents: texts, or what ``text_of`` gives the text of.
        text_of: the text of a document.
        most_characters: a list is whole with the document that reaches this; None for what is fast alone.
    """
    most_characters = _BATCH_CHARACTERS if most_characters is None else most_characters
    batch: list[_T] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(text_of(document))
        if len(batch) >= _BATCH_DOCUMENTS or characters >= most_characters:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def text_of(numbered: tuple[int, str]) -> str:
    """The text of a document that comes with its number."""
    return numbered[1]


def _tokenise(source: Source, tokenizer: Tokenizer, split: Split, writers: dict[Region, "_Writer"]) -> None:
    """Read ``source`` once, from the front, and hand each document to the writer of its region."""
    # on stderr, and only where it takes long enough to be asked about
    documents = tqdm(source.numbered(), desc=f"tokenising {source.label}", unit=" documents", delay=2, file=sys.stderr)
    for batch in in_batches(documents, text_of):
        kept = [(region, text) for number, text in batch if (region := split.region(number)) is not None]
        for (region, text), ids in zip(kept, encode_documents(tokenizer, [text for _, text in kept]), strict=True):
            writers[region].add(text, ids)
        held_out = [writer.n_tokens for region, writer in writers.items() if region != split.rest]
        counted = held_out or [writer.n_tokens for writer in writers.values()]
        if split.limit_tokens is not None and min(counted) >= split.limit_tokens:
            break
    source.say_skipped(source.skipped)


class _Writer:
    """Writes one region; the manifest comes last.

    Args:
        directory: made here.
        manifest: of the region, with counts of zero.
        files: closes the open files.
    """

    def __init__(self, directory: Path, manifest: Manifest, files: ExitStack) -> None:
        directory.mkdir()
        self._directory, self._manifest = directory, manifest
        self._tokens = files.enter_context((directory / _TOKENS).open("wb"))
        self._offsets = files.enter_context((directory / _OFFSETS).open("wb"))
        self._offsets.write(np.uint64(0).tobytes())
        self.n_documents = self.n_tokens = self.n_bytes = 0

    def add(self, text: str, ids: NDArray[np.int64]) -> None:
        self.n_documents += 1
        self.n_tokens += len(ids)
        self.n_bytes += len(text.encode())
        self._tokens.write(ids.astype(self._manifest.dtype).tobytes())
        self._offsets.write(np.uint64(self.n_tokens).tobytes())

    def finish(self) -> None:
        for file in (self._tokens, self._offsets):
            file.flush()
            os.fsync(file.fileno())
        manifest = dataclasses.replace(
            self._manifest, n_documents=self.n_documents, n_tokens=self.n_tokens, n_bytes=self.n_bytes
        )
        content = json.dumps(dataclasses.asdict(manifest), indent=2) + "\n"
        write_atomically(self._directory / _MANIFEST, content.encode())
