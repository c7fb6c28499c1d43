"""Text in, packed sequences out.

readers -> sources    files, packages, Hub datasets, mixtures and prepared shards as streams of documents
tokenizer             text to ids and back
regions               which documents are held out
corpus                a source tokenised once: memory-mapped regions for training, validation and test
prepare -> shards     the same for any size: on all cores, resumable, into a folder that goes anywhere
packing, best_fit     which tokens a sequence reads, and what documents make of it
order                 which sequence comes when
budget                tokens and global batch to steps and accumulation
loaders               batches for Lightning from a corpus
lanes -> stream       the same on the fly, from a source too large to keep
record                a hash of what was trained on, and where a stream stands
retrieval             tasks that are made instead of read: recall of keys, and a passkey
evaluation_reader     regions, texts and tasks to what each stage is evaluated on
datamodule            all of it behind one LightningDataModule
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpath.data.budget import Budget, Plan
    from kvpath.data.datamodule import PackedText
    from kvpath.data.retrieval import Passkey, Recall
    from kvpath.data.sources import Files, Filtered, Hub, Mixture, PackageFiles, Prepared, Source
    from kvpath.data.tokenizer import Tokenizer, TokenizerConfig

__all__ = [
    "Budget",
    "Files",
    "Filtered",
    "Hub",
    "Mixture",
    "PackageFiles",
    "PackedText",
    "Passkey",
    "Plan",
    "Prepared",
    "Recall",
    "Source",
    "Tokenizer",
    "TokenizerConfig",
]

_WHERE = {
    "Budget": "budget",
    "Passkey": "retrieval",
    "Plan": "budget",
    "PackedText": "datamodule",
    "Recall": "retrieval",
    "Tokenizer": "tokenizer",
    "TokenizerConfig": "tokenizer",
}


def __getattr__(name: str) -> Any:
    """Import torch only when something needs it: the workers of ``kvpath prepare`` do not."""
    if name not in __all__:
        raise AttributeError(f"module 'kvpath.data' has no attribute {name!r}")
    return getattr(import_module(f"kvpath.data.{_WHERE.get(name, 'sources')}"), name)
