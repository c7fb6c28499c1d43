"""Training: the LightningModule, its optimizer and schedule, and the callbacks of a run."""

from kvpath.training.module import LanguageModel
from kvpath.training.optimizer import OptimizerConfig

__all__ = ["LanguageModel", "OptimizerConfig"]
