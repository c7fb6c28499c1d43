"""Runs as the paper's tables and figures, ours beside the printed ones."""
