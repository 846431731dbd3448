"""Titles of the stages that a run will have. They are known before it begins, so lines of progress can count them."""

from __future__ import annotations

from ..config import PruneConfig
from ..measure.statistics import Statistics
from ..notes import muted
from ..stage_names import StageName
from . import stages
from .read_texts import own_windows
from .texts import with_sources


def stage_titles(
    config: PruneConfig, statistics: Statistics | None = None, *, calibration=None, eval=None, saves: bool = False
) -> list[str]:
    """Titles of the stages of pipeline.run_prune(), in order.

    Args:
        config, statistics, calibration, eval: as pipeline.prune().
        saves: also list the stages before and after it: loading and saving the model.
    """
    config = _resolved(config, calibration, eval, statistics)
    reads = stages.reads(config, statistics)
    compares = bool(config.guards) or reads["calibration"] or config.compares_with_wanda
    check, evaluates = compares and not config.no_check, bool(config.eval)
    wanted = [
        (StageName.LOAD, saves),
        (StageName.SAMPLE, own_windows(config, **reads) > 0),
        (StageName.TEXT, evaluates or any(reads.values())),
        (StageName.EVAL_DENSE, evaluates),
        (StageName.CALIBRATE, config.reads_statistics and statistics is None),
        (StageName.CHOOSE, config.responds),
        (StageName.BUDGETS, config.nm is None and (config.responds or config.needs_budgets)),
        (StageName.CHECK, check),
        (StageName.CALIBRATE, config.weighs_tokens),
        (StageName.PRUNE, True),
        (StageName.CHECK, check),
        (StageName.EVAL_PRUNED, evaluates),
        (StageName.SAVE, saves),
    ]
    return [name.title for name, runs in wanted if runs]


def calibration_titles(config: PruneConfig, *, calibration=None, loads: bool = False) -> list[str]:
    """Titles of the stages of pipeline.collect(), in order; with `loads`, loading the model is the first."""
    config = _resolved(config, calibration, None, None)
    samples = own_windows(config, calibration=True, domains=False) > 0
    names = [StageName.LOAD] * loads + [StageName.SAMPLE] * samples + [StageName.CALIBRATE]
    return [name.title for name in names]


def _resolved(config: PruneConfig, calibration, eval, statistics: Statistics | None) -> PruneConfig:
    with muted():  # the run itself warns
        return with_sources(config, calibration, eval, statistics)
