"""One-shot pruning of Hugging Face causal language models: Magnitude, Wanda, SparseGPT, F-Wanda and F-SparseGPT."""

from .calibrate import Statistics
from .config import PruneConfig
from .errors import UserError
from .load import load_model
from .pipeline import collect, prune
from .report import MatrixRow, Report
from .save import save_pruned

__all__ = [
    "MatrixRow",
    "PruneConfig",
    "Report",
    "Statistics",
    "UserError",
    "collect",
    "load_model",
    "prune",
    "save_pruned",
]
