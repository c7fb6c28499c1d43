"""Measuring trained models."""

from kvpath.evaluation.perplexity import Perplexity, by_position, summarise

__all__ = ["Perplexity", "by_position", "summarise"]
