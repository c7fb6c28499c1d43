"""Shards that ``kvpath prepare`` has made, as a source: nothing but local files is read."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvpath.data.cache import digest
from kvpath.data.regions import Corpus, Region, Split
from kvpath.data.shards import MANIFEST, TOKENIZER, ShardedCorpus, ShardFolder, read_json
from kvpath.data.sources.base import Source
from kvpath.errors import UserError

if TYPE_CHECKING:
    from kvpath.data.tokenizer import Tokenizer


@dataclass
class Prepared(Source):
    """Shards made by ``kvpath prepare``, mapped into memory. Their tokenizer and what they hold out lie with them.

    Args:
        directory: the ``--output`` of ``kvpath prepare``.
        verify: before anything else compare the checksum of every file, as ``kvpath prepare --verify DIRECTORY`` does,
            once on each machine: that reads all of them. Otherwise only their sizes are looked at.
    """

    directory: str
    verify: bool = False

    @property
    def label(self) -> str:
        return self._folder().plan.label

    def documents(self) -> Iterator[str]:
        raise UserError(
            f"source {self.directory} holds tokens, not text: state data.stream: false and no other data.tokenizer"
        )

    def fingerprint(self) -> str:
        return digest("prepared", read_json(Path(self.directory) / MANIFEST, "the manifest of prepared shards"))

    def check(self) -> None:
        if self.verify:
            self._folder().verify()

    def tokenizer(self, name: str) -> "Tokenizer | None":
        from kvpath.data.tokenizer import TokenizerConfig

        # first, since a run's own tokenizer is there where its shards may not be
        if Path(name).exists() or name not in ("train", (plan := self._folder().plan).tokenizer_name):
            return None
        return TokenizerConfig(str(Path(self.directory) / TOKENIZER), end_of_text=plan.end_of_text).load()

    def own_split(self, stated: Split) -> Split:
        return dataclasses.replace(stated, holdout_every=stated.holdout_every or self._folder().plan.holdout_every)

    def corpora(self, tokenizer: "Tokenizer", split: Split) -> Mapping[Region, Corpus]:
        folder = self._folder()
        plan, problems = folder.plan, []
        if tokenizer.fingerprint != plan.tokenizer:
            problems.append(
                f"data.tokenizer is not the one that {self.directory} was made with ({plan.tokenizer_name});"
                f" state data.tokenizer.name: {Path(self.directory) / TOKENIZER}"
            )
        if split.holdout_every not in (None, plan.holdout_every):
            problems.append(
                f"data.holdout_every is {split.holdout_every}, but {self.directory} was made with"
                f" {plan.holdout_every}: other documents would be held out; state that, or null"
            )
        UserError.raise_all(problems)
        corpora = folder.corpora()
        if split.rest in (None, "train") or plan.holdout_every is not None:
            return corpora
        return {split.rest: _as_region(corpora["train"], split.rest)}

    def _folder(self) -> ShardFolder:
        return ShardFolder(Path(self.directory))


def _as_region(corpus: ShardedCorpus, region: Region) -> ShardedCorpus:
    """Shards that hold out nothing, all of which are to be evaluated on."""
    corpus.manifest = dataclasses.replace(corpus.manifest, region=region)
    return corpus
