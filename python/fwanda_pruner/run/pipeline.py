"""One run, from a dense model and a text to a pruned model and its record.

text -> windows -> engine -> sums -> budgets or masks -> block loop -> record
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..allocate.budgets import ScoreScales, count_floored_rows
from ..allocate.search import Choice
from ..config import CALIBRATION, PruneConfig, settings_of
from ..engine.all_weights import WeightCounts, check_finite, count_weights, fingerprint
from ..engine.attention import check_backward
from ..engine.device import device_rules, evaluating, machine_limits, model_device
from ..engine.engine import Engine, make_engine
from ..engine.ranks import Ranks
from ..errors import UserError
from ..evaluate.perplexity import engine_perplexity
from ..formats.source import surplus_layers
from ..measure.statistics import Statistics
from ..methods.job import Inputs
from ..model.arguments import expect_tokenizer, expect_type
from ..model.in_use import expect_free
from ..model.place import warn_of_other_place
from ..model.plain import check_plain
from ..model.targets import Skipped, Target, check_model, check_target_dtypes, find_targets, select_targets
from ..notes import raise_no_more, recording, showing, warn
from ..progress import planned
from ..report.record import Report
from ..setting_checks import expect_flags
from ..text.windows import given_tokens, tokens_sha256
from . import outcome, stages
from .energy import EnergyMeter
from .outcome import Pruned
from .read_texts import own_windows, read_texts
from .save import check_savable
from .stage import Stages
from .state import RunState
from .texts import Texts, check_ids, sources_of, with_sources
from .titles import calibration_titles, stage_titles


def prune(
    model: nn.Module,
    tokenizer=None,
    *,
    config: PruneConfig | None = None,
    statistics: Statistics | None = None,
    calibration: str | Sequence[str] | Tensor | None = None,
    eval: str | Tensor | Sequence[str | Tensor] | None = None,
    state: RunState | None = None,
    progress: bool = True,
    **settings,
) -> Report:
    """Prunes a causal language model in place.

    Args:
        model: a Hugging Face causal language model with floating-point weights, on the device to work on.
        tokenizer: its tokenizer; not needed when all text is given as token ids.
        config: the settings; or give them by name in **settings.
        statistics: of this dense model, from collect(). What they hold is not measured again.
        calibration: overrides config.calibration: a text SOURCE[:SHARE], a list of them, or token ids [S, L] int64,
            which are used as they are.
        eval: overrides config.eval: a text, token ids [S, L] int64, or a list of them. Token ids are used as they are,
            and the record names them "tokens", "tokens 2" and so on.
        state: keeps finished stages, so that an interrupted run does not repeat them.
        progress: announce the stages, and show bars or lines of progress, on standard error.
        **settings: fields of PruneConfig, e.g. method="fwanda", allocation="global", sparsity=0.5.

    Returns:
        The record of the run; save it with the model by save_pruned(). masks() gives the masks.

    Raises:
        UserError: an argument, a setting, the text or the model does not allow it; the message is one line.

    Warns:
        UserWarning: what the record lists in `warnings`, each at the line that calls prune(). Where the filters make
            warnings errors, the first one ends the run; once weights change, the record alone has them.
    """
    report, _ = run_prune(
        model,
        tokenizer,
        config=_config(config, settings),
        statistics=statistics,
        calibration=calibration,
        eval=eval,
        state=state,
        progress=progress,
        named=settings,
    )
    return report


def _config(config: PruneConfig | None, settings: dict, names: Sequence[str] | None = None) -> PruneConfig:
    """The settings that a function was given as config= or by name.

    Args:
        config: None: by name.
        settings: by name.
        names: of the settings that count there; None: all.

    Raises:
        UserError: a setting is not allowed, or both are given.
    """
    expect_type("config", config, PruneConfig, "give the settings by name, or use PruneConfig.from_dict()")
    if config is not None and settings:
        raise UserError(f"give either config or settings by name, got both (by name: {', '.join(settings)})")
    if config is not None:
        return config
    if names is not None and (others := [name for name in settings if name not in names]):
        raise UserError(f"the setting {others[0]!r} has no effect here; those that have are {', '.join(names)}")
    return PruneConfig.from_dict(settings)


def run_prune(
    model: nn.Module,
    tokenizer,
    *,
    config: PruneConfig,
    statistics: Statistics | None = None,
    calibration: str | Sequence[str] | Tensor | None = None,
    eval: str | Tensor | Sequence[str | Tensor] | None = None,
    state: RunState | None = None,
    progress: bool = True,
    choice: Choice | None = None,
    own: Tensor | None = None,
    named: Collection[str] = (),
    measured_later: bool = False,
) -> tuple[Report, Choice | None]:
    """prune(), for callers that run several settings with the same masks.

    Args:
        choice: what the search of "response" or "auto" chose in an earlier run on the same text. It is taken, and the
            search is left out.
        own: [S, L] int64 windows that the model wrote, from own_text(). If None or too few, the model writes them.
        named: the settings that the caller named, for warnings of those without effect.
        measured_later: whether the caller measures the result, and warns if the model is damaged.

    Returns:
        The record, and the choice of the search; None without a search.

    Raises:
        UserError: as prune().
    """
    _check_arguments(model, tokenizer, progress)
    expect_type("statistics", statistics, Statistics, "measure them by collect(), or read a file by Statistics.load()")
    if statistics is not None:
        statistics.expect_valid()
    expect_type("state", state, RunState, "make one by RunState(folder)")
    state = state or RunState()
    ranks = Ranks.current()
    stage, progress = Stages(state, model_device(model), ranks), progress and ranks.first
    titles = stage_titles(config, statistics, calibration=calibration, eval=eval) if progress else ()
    with planned(titles), _running(model, config, state.notes):
        warn_of_other_place(config, model)
        config = with_sources(config, calibration, eval, statistics, named)
        sources = sources_of(config, calibration, eval, statistics)
        targets, skipped = plan(model, config)
        check_target_dtypes(targets)
        ranks.share(lambda: check_savable(model, tokenizer, state.output))
        engine = make_engine(model, targets, config, progress=progress)
        stages.check_given(config, model, statistics)
        if config.responds or config.weighs_tokens or (config.needs_fisher and statistics is None):
            check_backward(model, f"--method {config.method} --allocation {config.allocation}")
        stages.identify(state, config, engine, tokenizer, sources, statistics)

        reads = stages.reads(config, statistics)
        own, sampling_energy = stages.own_text(stage, engine, config, tokenizer, own, **reads)
        texts = stages.texts(stage, engine, config, tokenizer, sources, own, **reads)
        dense = stages.dense_perplexity(stage, engine, texts)
        with stage.metered(EnergyMeter(engine.device, config.energy)) as energy:
            pruned = _prune(stage, engine, config, texts, statistics, choice)
        perplexity = outcome.perplexity(texts, dense, stages.pruned_perplexity(stage, engine, texts), tokenizer)
        outcome.warn_of_zeros(pruned.rows, float(config.removed))
        if not measured_later:
            outcome.warn_of_damage(config, model, perplexity, pruned.domains)
        rows = [*pruned.rows, *(outcome.skipped_row(engine, item) for item in skipped)]
        report = outcome.report(stage, engine, config, texts, pruned, rows, perplexity, energy, sampling_energy)
    return report, pruned.choice


@contextmanager
def _running(model: nn.Module, config: PruneConfig, notes: list[str]) -> Iterator[None]:
    """The conditions under which a model is measured and pruned; the warnings inside are added to the notes."""
    device = model_device(model)
    shown = showing(Ranks.current().first)
    with machine_limits(), recording(notes), shown, evaluating(model), device_rules(model, config):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        yield


def _prune(
    stage: Stages, engine: Engine, config: PruneConfig, texts: Texts, given: Statistics | None, choice: Choice | None
) -> Pruned:
    """Measures, chooses masks and prunes; given: statistics, choice: of an earlier run."""
    statistics, passes = stages.statistics(stage, engine, config, texts, given)
    judge = stages.judge(stage, engine, config, texts, statistics, choice)
    choice = stages.choice(stage, engine, config, texts, statistics, judge, choice)
    settled, scales = (config, None) if choice is None else (choice.apply(config), choice.scales)
    budgets = stages.budgets(stage, engine, settled, statistics, scales, searched=choice is not None)
    refit = stages.refit(engine, settled, statistics, judge, scales)
    before = stages.losses_before(stage, engine, settled, texts, statistics)
    token_sq_grads, gradient_passes = stages.token_sq_grads(stage, engine, config, texts)
    inputs = Inputs(texts.calibration, statistics, budgets, scales, token_sq_grads, refit)
    raise_no_more()
    rows, row_histogram, refitted = stages.pruned_blocks(stage, engine, settled, inputs)
    domains = stages.domains(stage, engine, config, texts, before)
    floored = _floored_rows(settled, scales, statistics, engine.targets)
    passes = passes or gradient_passes
    return Pruned(settled, statistics, choice, passes, floored, rows, row_histogram, refitted, domains)


def _check_arguments(model, tokenizer, progress, *, packed: bool = False) -> None:
    expect_free(model)  # first, because a model in use does not look plain
    check_plain(model, packed=packed)
    expect_flags(progress=progress)
    expect_tokenizer(tokenizer)


def collect(
    model: nn.Module,
    tokenizer=None,
    *,
    config: PruneConfig | None = None,
    calibration: str | Sequence[str] | Tensor | None = None,
    progress: bool = True,
    own: Tensor | None = None,
    **settings,
) -> Statistics:
    """Measures statistics for any sparsity, pattern and allocation of wanda and fwanda.

    One forward pass over the text, and one backward pass over `fisher_samples` of its windows, serve them all.

    Args:
        model, tokenizer, config, calibration, progress, **settings: as prune(). Only the settings of the text, of BOS,
            of the Fisher information and of the passes count: others in config have no effect, and others by name are
            refused.
        own: as run_prune().

    Raises:
        UserError: as prune().
    """
    _check_arguments(model, tokenizer, progress)
    groups = (*CALIBRATION, "passes")
    config = PruneConfig(**_config(config, settings, settings_of(*groups)).select(*groups))
    if own is not None:
        check_ids("own", own)
        own = given_tokens(own, config.seqlen)
    ranks = Ranks.current()
    stage, progress = Stages(RunState(), model_device(model), ranks), progress and ranks.first
    titles = calibration_titles(config, calibration=calibration) if progress else ()
    with planned(titles), _running(model, config, stage.notes):
        config = with_sources(config, calibration, None, None, named=settings)
        targets, _ = plan(model, config)
        check_target_dtypes(targets)
        check_backward(model, f"--fisher {config.fisher}")
        engine = make_engine(model, targets, config, progress=progress)
        sources = sources_of(config, calibration, None, None)
        reads = {"calibration": True, "domains": False}
        own, _ = stages.own_text(stage, engine, config, tokenizer, own, **reads)
        texts = read_texts(config, engine, tokenizer, sources, own, **reads)
        _check_ranks(engine, config, [texts.calibration])
        return stages.measured_statistics(stage, engine, config, texts, config.fisher)


def own_text(model: nn.Module, tokenizer, *, configs: Sequence[PruneConfig], progress: bool = True) -> Tensor | None:
    """Lets the model write the text that runs with these settings read, once for all of them.

    Args:
        model, tokenizer, progress: as prune().
        configs: with the same seqlen, own_seed() and start_token. There are as many windows as the run that reads most
            needs.

    Returns:
        [S, L] int64 windows on the CPU; None if no run reads any.

    Raises:
        UserError: as prune().
    """
    _check_arguments(model, tokenizer, progress)
    stage = Stages(RunState(), model_device(model), Ranks.current())
    needs = [(config, stages.reads(config, None)) for config in (config.resolved() for config in configs)]
    config, reads = max(needs, key=lambda need: own_windows(need[0], **need[1]))
    with _running(model, config, stage.notes):
        engine = make_engine(model, [], config, progress=progress)
        return stages.own_text(stage, engine, config, tokenizer, **reads)[0]


def evaluate_model(
    model: nn.Module,
    tokenizer=None,
    *,
    config: PruneConfig | None = None,
    eval: str | Tensor | Sequence[str | Tensor] | None = None,
    progress: bool = True,
    **settings,
) -> dict:
    """Perplexity of a model as it is, with its protocol, and the zeros it holds.

    Args:
        model, tokenizer, config, eval, progress, **settings: as prune(), and the model may be packed. Only the settings
            eval, eval_seqlen (default: seqlen), eval_windows and bos count: others in config have no effect, and others
            by name are refused.

    Returns:
        {"perplexity": [{source, perplexity, seqlen, windows, tokens_sha256, bos, tokenizer}], one for each text,
        "sparsity": {"matrices": over the prunable matrices, "model": over all parameters}}.

    Raises:
        UserError: as prune().
    """
    _check_arguments(model, tokenizer, progress, packed=True)
    config = _config(config, settings, (*settings_of("eval", "bos"), "seqlen"))
    with machine_limits(), recording([]), showing(Ranks.current().first), evaluating(model):
        config = with_sources(config, None, eval, None)
        targets, _ = plan(model, config)
        engine = make_engine(model, targets, config, progress=progress)
        sources = sources_of(config, None, eval, None)
        texts = read_texts(config, engine, tokenizer, sources, calibration=False)
        _check_ranks(engine, config, texts.evaluation.values())
        found = [
            {"source": source, "perplexity": engine_perplexity(engine, windows, label=f"perplexity, {source}")}
            | texts.protocol_of(source, tokenizer)
            for source, windows in texts.evaluation.items()
        ]
        return {"perplexity": found, "sparsity": _zero_shares(count_weights(engine))}


def plan(model: nn.Module, config: PruneConfig) -> tuple[list[Target], list[Skipped]]:
    """The targets of a plain model and what is left alone, after all checks that need no text.

    Raises:
        UserError: as prune().
    """
    if surplus := surplus_layers(model):
        warn(surplus)
    if config.nm and not config.responds and config.method == "fwanda":
        warn(
            f"row budgets have no effect inside an n:m group, so fwanda with {config.pattern} equals wanda with "
            f"{config.pattern}; --allocation response also weighs columns and differs"
        )
    if config.weighs_tokens and config.allocation != "uniform":
        warn(f"--allocation {config.allocation} has no effect with --pattern {config.pattern}")
    targets, skipped = select_targets(*find_targets(model), config)
    engine = make_engine(model, targets, config)
    with engine.running():
        check_model(model, targets, config)
    check_finite(engine)
    return targets, skipped


def _check_ranks(engine: Engine, config: PruneConfig, texts: Iterable[Tensor]) -> None:
    """Refuses ranks with other weights, settings or texts than the first."""
    engine.ranks.check_same(
        lambda: {
            "engine": engine.name,
            "weights": fingerprint(engine),
            "settings": config.to_dict(),
            "texts": [tokens_sha256(text) for text in texts],
        }
    )


def _floored_rows(
    config: PruneConfig, scales: ScoreScales | None, statistics: Statistics | None, targets: list[Target]
) -> int | None:
    """Rows whose omega was raised to the floor of row budgets and of F-SparseGPT's weights of rows; None without."""
    if scales is not None or not config.needs_fisher or not (config.traits.weighs_rows or config.allocation == "row"):
        return None
    return count_floored_rows(statistics, [target.name for target in targets])


def _zero_shares(counts: WeightCounts) -> dict[str, float]:
    return {
        "matrices": counts.target_zeros / counts.target_parameters,
        "model": counts.zeros / counts.parameters,
    }
