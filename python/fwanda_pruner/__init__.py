"""One-shot pruning of Hugging Face causal language models: Magnitude, Wanda, SparseGPT, F-Wanda and F-SparseGPT."""

import importlib

from .register_packed import register_when_possible

# loaded on first use: the command line answers --help and mistakes without importing torch
_HOMES = {
    "MatrixRow": "report.record",
    "PruneConfig": "config",
    "Report": "report.record",
    "RunState": "run.state",
    "Statistics": "measure.statistics",
    "UserError": "errors",
    "collect": "run.pipeline",
    "evaluate_model": "run.pipeline",
    "evaluate_tasks": "evaluate.lm_eval_tasks",
    "keep_zeros": "model.keep_zeros",
    "load_masks": "formats.masks",
    "load_model": "model.load",
    "load_packed": "model.load",
    "masks": "run.masks",
    "pack_": "model.pack",
    "prune": "run.pipeline",
    "save_pruned": "run.save",
    "to_semi_structured": "model.semi_structured",
    "unpack_": "model.pack",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


register_when_possible()
