"""Measuring trained models."""

from kvpath.evaluation.perplexity import Perplexity, summarise

__all__ = ["Perplexity", "summarise"]
