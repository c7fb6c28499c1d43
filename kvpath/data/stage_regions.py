"""The regions of text that a stage reads: of which source each is, and how that is split."""

from collections.abc import Mapping
from typing import Self

from kvpath.data.regions import Corpus, Region, Split
from kvpath.data.sources import Source
from kvpath.data.tokenizer import Tokenizer

_REGIONS: dict[str, list[Region]] = {
    "fit": ["train", "validation"],
    "validate": ["validation"],
    "test": ["test"],
    "predict": ["test"],
}


class StageRegions:
    """Regions that are tokenised once and kept.

    Args:
        sources: of each region, its source and how that is split.
    """

    def __init__(self, sources: Mapping[Region, tuple[Source, Split]]) -> None:
        self._sources = sources

    @classmethod
    def of(cls, stage: str, source: Source, explicit: Mapping[Region, Source | None], split: Split) -> Self:
        """Those of a stage.

        Args:
            stage: fit, validate, test or predict.
            source: has the regions that no other has, if it knows them.
            explicit: sources that are each one region as a whole.
            split: of the source, unless it has one of its own.
        """
        sources: dict[Region, tuple[Source, Split]] = {}
        for region in _REGIONS[stage]:
            if own := explicit.get(region):
                sources[region] = own, Split(rest=region)
            elif region in source.own_split(split).regions:
                sources[region] = source, split
        return cls(sources)

    def corpora(self, tokenizer: Tokenizer) -> dict[Region, Corpus]:
        """The regions, tokenised: made on first use, then found in the cache.

        Raises:
            UserError: one cannot be read.
        """
        return {region: source.corpora(tokenizer, split)[region] for region, (source, split) in self._sources.items()}

    def check(self) -> None:
        """See `Source.check`."""
        for source in {id(source): source for source, _ in self._sources.values()}.values():
            source.check()
