"""The files of a shard while it is written: under other names until they are whole."""

import hashlib
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvpath.data.cache import sync_directory
from kvpath.data.regions import Region
from kvpath.data.shards import KINDS, ShardPlan, ShardRegion


@dataclass
class Batch:
    """Documents in a row: their tokens, and of each the number of tokens, the bytes of text and the region.

    And how much of the part had been read by then, and how many documents of it skipped.
    """

    tokens: NDArray[np.uint32]
    lengths: NDArray[np.int64]
    bytes: NDArray[np.int64]
    regions: NDArray[np.str_]
    skipped: int
    fraction: float | None

    def of(self, region: Region) -> NDArray[np.bool_]:
        """Which documents are of a region."""
        return np.asarray(self.regions == region)

    def cut(self, room: int | None) -> "Batch":
        """The documents at the front up to the one by which so many training tokens are reached."""
        if room is None:
            return self
        reached = np.cumsum(np.where(self.of("train"), self.lengths, 0)) >= room
        n = int(reached.argmax()) + 1 if reached.any() else len(self.lengths)
        tokens = self.tokens[: self.lengths[:n].sum()]
        return Batch(tokens, self.lengths[:n], self.bytes[:n], self.regions[:n], self.skipped, self.fraction)


class ShardWriter:
    """The files of one shard, under other names until they are whole."""

    def __init__(self, directory: Path, name: str, plan: ShardPlan) -> None:
        unique = uuid.uuid4().hex
        self.text_bytes = 0
        self._files = {
            region: RegionWriter(
                {kind: directory / region / f"{name}.{kind}" for kind in KINDS}, plan.dtype, f".{unique}.part"
            )
            for region in plan.regions
        }

    def add(self, batch: Batch) -> int:
        """Write a batch, and give the bytes written."""
        self.text_bytes += int(batch.bytes.sum())
        written = 0
        for region, writer in self._files.items():
            own = batch.of(region)
            # held-out documents are few, and most often a batch is nearly all of one region
            tokens = batch.tokens if own.all() else batch.tokens[np.repeat(own, batch.lengths)]
            written += writer.add(tokens, batch.lengths[own], int(batch.bytes[own].sum()))
        return written

    def finish(self) -> dict[Region, ShardRegion]:
        """Give the files their names."""
        return {region: writer.finish() for region, writer in self._files.items()}

    def discard(self) -> None:
        """Remove what has no name yet."""
        for writer in self._files.values():
            writer.discard()


class RegionWriter:
    def __init__(self, paths: dict[str, Path], dtype: str, suffix: str) -> None:
        self._paths, self._dtype = paths, dtype
        self._temporary = {kind: path.with_name(path.name + suffix) for kind, path in paths.items()}
        self._files = {kind: path.open("wb") for kind, path in self._temporary.items()}
        self._sha256 = {kind: hashlib.sha256() for kind in paths}
        self._documents = self._tokens = self._bytes = 0
        self._write("offsets", np.zeros(1, dtype=np.uint64))

    def add(self, tokens: NDArray[np.uint32], lengths: NDArray[np.int64], n_bytes: int) -> int:
        offsets = self._tokens + np.cumsum(lengths)
        self._documents += len(lengths)
        self._tokens += len(tokens)
        self._bytes += n_bytes
        return self._write("tokens", tokens.astype(self._dtype)) + self._write("offsets", offsets.astype(np.uint64))

    def _write(self, kind: str, numbers: NDArray[np.integer]) -> int:
        content = numbers.tobytes()
        self._files[kind].write(content)
        self._sha256[kind].update(content)
        return len(content)

    def finish(self) -> ShardRegion:
        for kind, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(self._temporary[kind], self._paths[kind])
        sync_directory(self._paths["tokens"].parent)
        checksums = {kind: checksum.hexdigest() for kind, checksum in self._sha256.items()}
        return ShardRegion(self._documents, self._tokens, self._bytes, checksums)

    def discard(self) -> None:
        for kind, file in self._files.items():
            file.close()
            self._temporary[kind].unlink(missing_ok=True)
