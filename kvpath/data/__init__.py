"""Text in, packed sequences out.

readers -> sources    files, packages and Hub datasets as streams of documents
tokenizer             text to ids and back
corpus                a source tokenised once: memory-mapped regions for training, validation and test
packing, order        which tokens a window reads, and which window comes when
budget                tokens and global batch to steps and accumulation
loaders, stream       batches for Lightning, from a corpus or on the fly
datamodule            all of it behind one LightningDataModule
"""

from kvpath.data.budget import Budget, Plan
from kvpath.data.datamodule import PackedText
from kvpath.data.sources import Files, Hub, PackageFiles, Source
from kvpath.data.tokenizer import Tokenizer, TokenizerConfig

__all__ = ["Budget", "Files", "Hub", "PackageFiles", "PackedText", "Plan", "Source", "Tokenizer", "TokenizerConfig"]
