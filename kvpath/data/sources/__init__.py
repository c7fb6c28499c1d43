"""Where documents come from.

base        what every source gives: documents, their numbers, and parts that are read on their own
files       local files, and files inside an installed package
hub         datasets of the Hugging Face Hub, streamed
combined    several sources mixed by weights, and one without some of its documents
prepared    shards that ``kvpath prepare`` has made
"""

from kvpath.data.sources.base import Part, Source
from kvpath.data.sources.combined import Filtered, Mixture
from kvpath.data.sources.files import Files, PackageFiles
from kvpath.data.sources.hub import Hub
from kvpath.data.sources.prepared import Prepared

__all__ = ["Files", "Filtered", "Hub", "Mixture", "PackageFiles", "Part", "Prepared", "Source"]
