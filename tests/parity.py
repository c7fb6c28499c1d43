"""What `kvpath.testing` compares, for tests that compare it in their own way."""

from kvpath.testing.parity import EXACT
from kvpath.testing.routes import left_padded, logits, packed, padded_chunks
from kvpath.testing.routes import through_cache as chunked

__all__ = ["CLOSE", "chunked", "left_padded", "logits", "packed", "padded_chunks"]

CLOSE = {"atol": EXACT, "rtol": 0.0}
"""For float64, where only the order of sums may differ."""
