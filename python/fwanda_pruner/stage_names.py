"""The stages of a run: their names in fwanda.json, and their titles for people."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class StageName(str, Enum):
    """Stages of a run, in order; the values are the keys of `seconds` in fwanda.json."""

    LOAD = "load"
    SAMPLE = "sample"
    TEXT = "text"
    EVAL_DENSE = "eval_dense"
    CALIBRATE = "calibrate"
    CHOOSE = "choose"
    BUDGETS = "budgets"
    CHECK = "check"
    PRUNE = "prune"
    EVAL_PRUNED = "eval_pruned"
    SAVE = "save"

    @property
    def title(self) -> str:
        """What the stage does, for lines of progress and reports."""
        return _TITLES[self]


_TITLES = {
    StageName.LOAD: "load the model",
    StageName.SAMPLE: "let the model write text",
    StageName.TEXT: "read the texts",
    StageName.EVAL_DENSE: "perplexity of the dense model",
    StageName.CALIBRATE: "calibrate",
    StageName.CHOOSE: "choose the allocation",
    StageName.BUDGETS: "decide how many weights each row keeps",
    StageName.CHECK: "compare losses on each text",
    StageName.PRUNE: "prune",
    StageName.EVAL_PRUNED: "perplexity of the pruned model",
    StageName.SAVE: "save and count the zeros in the files",
}

_BESIDE_PRUNING = (StageName.LOAD, StageName.TEXT, StageName.EVAL_DENSE, StageName.EVAL_PRUNED, StageName.SAVE)


def pruning_seconds(seconds: Mapping[str, float]) -> float:
    """Seconds of all stages that prune: without those that read, write or evaluate."""
    return sum(value for name, value in seconds.items() if name not in _BESIDE_PRUNING)
