"""The version, in a file that imports nothing: packaging reads it without importing kvpath."""

__version__ = "0.1.0"
