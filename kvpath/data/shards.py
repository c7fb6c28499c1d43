"""Prepared shards: what their folder holds, how they are read, and how damage is found.

A folder of shards holds

- ``plan.json``: what decides every byte of it;
- ``tokenizer.json``: what the tokens were made with;
- ``train/00003-0001.tokens`` and ``.offsets`` (``validation/`` and ``test/`` alike): shard 1 of part 3 of the source;
  tokens as uint16 or uint32, and where documents begin as uint64, one more than there are documents;
- ``shards/00003-0001.json``: counts and checksums of that shard, written when its files are whole;
- ``manifest.json``: the plan and all shards in order, written when none is missing.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped]

from kvpath.data.mapped import JoinedRun, MappedArray
from kvpath.data.regions import Manifest, Region, Split
from kvpath.errors import UserError

FORMAT_VERSION = 1
PLAN, MANIFEST, TOKENIZER, SHARDS = "plan.json", "manifest.json", "tokenizer.json", "shards"
KINDS = ("tokens", "offsets")

_READ_BYTES = 2**20


@dataclass(frozen=True)
class ShardPlan:
    """What decides every byte of a folder of shards.

    Args:
        format_version: of the folder.
        source: fingerprint of the source.
        label: what the source is called.
        tokenizer: fingerprint of the tokenizer.
        tokenizer_name: what the configuration called it.
        end_of_text: the token after each document.
        vocab_size: one more than the largest id.
        holdout_every: of every so many documents one is for validation and one for testing; None holds out none.
        max_tokens: an equal share of so many training tokens is taken from each part; None takes all.
        dtype: of tokens: uint16 or uint32.
        n_parts: parts of the source.
        shard_bytes: a shard ends once it holds so much text.
    """

    format_version: int
    source: str
    label: str
    tokenizer: str
    tokenizer_name: str
    end_of_text: str
    vocab_size: int
    holdout_every: int | None
    max_tokens: int | None
    dtype: str
    n_parts: int
    shard_bytes: int

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions that each shard has files of."""
        return Split(self.holdout_every).regions

    def item_bytes(self, kind: str) -> int:
        """Of a number in a file of this kind."""
        return np.dtype(self.dtype if kind == "tokens" else np.uint64).itemsize


@dataclass(frozen=True)
class ShardRegion:
    """Counts and checksums of one region of a shard.

    Args:
        documents: their number.
        tokens: their tokens, with the end-of-text token after each.
        bytes: UTF-8 bytes of their text.
        sha256: of the file of tokens and of the file of offsets.
    """

    documents: int
    tokens: int
    bytes: int
    sha256: dict[str, str]

    def n_items(self, kind: str) -> int:
        """Numbers in the file of this kind."""
        return self.tokens if kind == "tokens" else self.documents + 1


@dataclass(frozen=True)
class Shard:
    """What ``shards/*.json`` says of one shard.

    Args:
        part: of the source.
        number: within the part.
        skipped: documents that could not be decoded, from the beginning of the part to the end of the shard.
        last: whether the part ends here.
        regions: each region's counts and checksums.
    """

    part: int
    number: int
    skipped: int
    last: bool
    regions: dict[Region, ShardRegion]

    @property
    def name(self) -> str:
        """The stem of its files."""
        return shard_name(self.part, self.number)

    @property
    def documents(self) -> int:
        """Of all its regions."""
        return sum(region.documents for region in self.regions.values())

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Shard":
        """What ``dataclasses.asdict`` gave."""
        regions = {name: ShardRegion(**region) for name, region in values["regions"].items()}
        return cls(**{**values, "regions": regions})


def shard_name(part: int, number: int) -> str:
    """The stem of a shard's files."""
    return f"{part:05}-{number:04}"


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object in a file.

    Raises:
        UserError: it is none; begins with the path and says what was expected.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not {what}: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} is not {what}: a JSON object is wanted")
    return values


def manifest_of(plan: ShardPlan, shards: list[Shard]) -> dict[str, Any]:
    """The content of ``manifest.json``: a function of the plan and the shards alone."""
    total = {
        region: {
            name: sum(getattr(shard.regions[region], name) for shard in shards)
            for name in ("documents", "tokens", "bytes")
        }
        for region in plan.regions
    }
    skipped = sum(shard.skipped for shard in shards if shard.last)
    return {**asdict(plan), "skipped": skipped, "total": total, "shards": [asdict(shard) for shard in shards]}


class ShardFolder:
    """A finished folder of shards; opening it reads the manifest and nothing else.

    Args:
        directory: the folder.

    Raises:
        UserError: it is none that this version reads, or it is not finished.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not (directory / MANIFEST).is_file():
            if (directory / PLAN).is_file():
                raise UserError(f"{directory} is not finished: the same `kvpath prepare` goes on with it")
            raise UserError(
                f"{directory} holds no prepared shards, since it has no {MANIFEST}: `kvpath prepare -c ... --output"
                f" {directory}` makes them"
            )
        values = read_json(directory / MANIFEST, "the manifest of prepared shards")
        if values.get("format_version") != FORMAT_VERSION:
            raise UserError(
                f"{directory} has format_version {values.get('format_version')}, this kvpath reads {FORMAT_VERSION}"
            )
        self.total: dict[Region, dict[str, int]] = values.pop("total")
        self.shards = [Shard.from_json(shard) for shard in values.pop("shards")]
        self.skipped: int = values.pop("skipped")
        self.plan = ShardPlan(**values)

    def corpora(self) -> dict[Region, "ShardedCorpus"]:
        """All regions.

        Raises:
            UserError: files are missing or have another size than the manifest says.
        """
        UserError.raise_all(
            f"{path} has {found:,} bytes, not {expected:,}; its SHA-256 was {sha256}: delete it, and the same"
            " `kvpath prepare` makes it again"
            for path, expected, sha256 in self._files()
            if (found := path.stat().st_size if path.exists() else 0) != expected
        )
        return {region: ShardedCorpus(self, region) for region in self.plan.regions}

    def verify(self) -> None:
        """Read every file and compare its checksum.

        Raises:
            UserError: lists each damaged file with the checksum expected and the one found.
        """
        files = list(self._files())
        with ThreadPoolExecutor() as pool:
            sums = pool.map(lambda file: sha256_of(file[0]) if file[0].exists() else "no file", files)
            shown = tqdm(sums, f"verifying {self.directory}", len(files), unit=" files", delay=2, file=sys.stderr)
            problems = [
                f"{path}: SHA-256 should be {expected}, found {found}"
                for (path, _, expected), found in zip(files, shown, strict=True)
                if found != expected
            ]
        if problems:
            problems[-1] += "; delete what is damaged, and the same `kvpath prepare` makes it again"
        UserError.raise_all(problems)

    def _files(self) -> Iterator[tuple[Path, int, str]]:
        """Each file with its size and its checksum."""
        for shard in self.shards:
            yield from files_of(self.directory, self.plan, shard)


class ShardedCorpus:
    """One region of all shards as one corpus (see `kvpath.data.regions.Corpus`).

    Args:
        folder: the folder of shards.
        region: which region of it.
    """

    def __init__(self, folder: ShardFolder, region: Region) -> None:
        plan, total = folder.plan, folder.total[region]
        self.directory = folder.directory / region
        self.manifest = Manifest(
            plan.format_version,
            plan.source,
            plan.tokenizer,
            plan.label,
            region,
            plan.dtype,
            total["documents"],
            total["tokens"],
            total["bytes"],
        )
        self._shards = [(shard.name, shard.regions[region]) for shard in folder.shards]

    @cached_property
    def tokens(self) -> JoinedRun:
        """(n_tokens,)."""
        return JoinedRun(self._mapped("tokens", self.manifest.dtype))

    @cached_property
    def offsets(self) -> JoinedRun:
        """(n_documents + 1,)."""
        before = np.cumsum([0, *(region.tokens for _, region in self._shards)]).tolist()
        end = np.array(before[-1:], dtype=np.uint64)
        return JoinedRun(self._mapped("offsets", np.dtype(np.uint64).name), add=before[:-1], leave_out=1, end=end)

    def _mapped(self, kind: str, dtype: str) -> list[MappedArray]:
        return [
            MappedArray(self.directory / f"{name}.{kind}", dtype, region.n_items(kind)) for name, region in self._shards
        ]


def files_of(directory: Path, plan: ShardPlan, shard: Shard) -> Iterator[tuple[Path, int, str]]:
    """The files of a shard, each with its size and its checksum."""
    for name, region in shard.regions.items():
        for kind in KINDS:
            path = directory / name / f"{shard.name}.{kind}"
            yield path, region.n_items(kind) * plan.item_bytes(kind), region.sha256[kind]


def sha256_of(path: Path) -> str:
    """Of a file's content."""
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            checksum.update(block)
    return checksum.hexdigest()
