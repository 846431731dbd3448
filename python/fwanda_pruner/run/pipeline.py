"""One run, from a dense model and a text to a pruned model and its record.

text -> windows -> engine -> sums -> budgets or masks -> block loop -> record
"""

from __future__ import annotations

import math
import resource
import warnings
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor, nn

from ..allocate.budgets import count_floored_rows, keep_budgets
from ..allocate.choose import Choice, choose
from ..allocate.masks import masks_of
from ..config import PruneConfig, settings_of
from ..engine.accumulate import WeightCounts, check_finite, count_weights, count_zeros, fingerprint
from ..engine.device import device_rules, evaluating, model_device
from ..engine.loop import PassRecord, PassSettings
from ..engine.resident import ResidentEngine
from ..errors import UserError
from ..evaluate.perplexity import check_dense, perplexity
from ..measure.statistics import Statistics, measure_statistics
from ..measure.token_weights import measure_token_sq_grads
from ..methods.block_loop import prune_blocks
from ..methods.job import Inputs
from ..model.targets import Skipped, Target, check_model, find_targets, select_targets
from ..report.record import MatrixRow, Report, versions
from ..text.windows import tokens_sha256
from . import codecs
from .energy import EnergyMeter
from .stage import StageName, Stages
from .state import RunState
from .texts import HeldOut, Sources, Texts, protocol, read_texts, sources_of, with_sources


def prune(
    model: nn.Module,
    tokenizer=None,
    *,
    config: PruneConfig | None = None,
    statistics: Statistics | None = None,
    calibration: str | Tensor | None = None,
    eval: str | Tensor | None = None,
    state: RunState | None = None,
    progress: bool = True,
    **settings,
) -> Report:
    """Prunes a causal language model in place.

    Args:
        model: a Hugging Face causal language model with floating-point weights, on the device to work on.
        tokenizer: its tokenizer; not needed when all text is given as token ids.
        config: the settings; or give them by name in **settings.
        statistics: of this dense model, from collect(); the forward and backward pass is then left out.
        calibration: overrides config.calibration; may be token ids [S, L] int64, used as they are.
        eval: overrides config.eval; may be token ids [S, L] int64.
        state: keeps finished stages, so that an interrupted run does not repeat them.
        progress: show bars, where standard error is a terminal.
        **settings: fields of PruneConfig, e.g. method="fwanda", allocation="global", sparsity=0.5.

    Returns:
        The record of the run; save it with the model by save_pruned().

    Raises:
        UserError: a setting, the text or the model does not allow it; the message is one line.
        TypeError: both config and settings are given.
    """
    if config is not None and settings:
        raise TypeError(f"give either config or settings, got both (settings: {', '.join(settings)})")
    report, _ = run_prune(
        model,
        tokenizer,
        config=config or PruneConfig.from_dict(settings),
        statistics=statistics,
        calibration=calibration,
        eval=eval,
        state=state,
        progress=progress,
    )
    return report


def run_prune(
    model: nn.Module,
    tokenizer,
    *,
    config: PruneConfig,
    statistics: Statistics | None = None,
    calibration: str | Tensor | None = None,
    eval: str | Tensor | None = None,
    state: RunState | None = None,
    progress: bool = True,
    choice: Choice | None = None,
) -> tuple[Report, Choice | None]:
    """prune(), for callers that run several settings with the same masks.

    Args:
        choice: what the search of "response" or "auto" chose in an earlier run on the same text; it is not repeated.

    Returns:
        The record, and what the search chose; None without a search.

    Raises:
        UserError: as prune().
    """
    device = model_device(model)
    stage = Stages(state or RunState(), device)
    with stage.noting(), evaluating(model), device_rules(model, config):
        config = with_sources(config, calibration, eval, statistics)
        sources = sources_of(config, calibration, eval, statistics)
        targets, skipped = plan(model, config)
        engine = ResidentEngine(model, targets, PassSettings.of(config), progress=progress)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        _check_given(config, model, statistics)
        _identify(state, stage, config, engine, sources, statistics)
        measures = config.reads_statistics and statistics is None
        texts = stage(
            StageName.TEXT,
            lambda: read_texts(
                config,
                model,
                tokenizer,
                sources,
                calibration=config.runs_blocks or config.responds or measures,
                held_out=config.checks or (config.responds and choice is None),
            ),
            codecs.TEXTS,
        )
        dense = _dense_perplexity(stage, engine, texts)
        with stage.metered(EnergyMeter(device, config.energy)) as energy:
            statistics, passes = _statistics(stage, engine, config, texts, statistics)
            choice = choice or _choice(stage, engine, config, texts, statistics)
            settled = config if choice is None else choice.apply(config)
            scales = None if choice is None else choice.scales
            budgets = None
            if settled.needs_budgets:
                budgets = stage(
                    StageName.BUDGETS,
                    lambda: keep_budgets(settled, engine, statistics, scales),
                    codecs.budgets_codec(device),
                )
            check = _wanda_loss(stage, engine, config, texts.held_out, statistics)
            token_sq_grads = None
            if config.weighs_tokens:
                token_sq_grads, passes = _token_sq_grads(stage, engine, config, texts)
            inputs = Inputs(texts.calibration, statistics, budgets, scales, token_sq_grads)
            rows, row_histogram = stage(
                StageName.PRUNE,
                lambda: prune_blocks(engine, settled, inputs, stage.steps(StageName.PRUNE, codecs.BLOCK)),
            )
            check = _compare(stage, engine, config, texts.held_out, check)
        pruned = None
        if texts.evaluation is not None:
            pruned = stage(StageName.EVAL_PRUNED, partial(_perplexity, engine, texts.evaluation, "pruned perplexity"))
        counts = count_weights(engine)
        report = Report(
            config={
                "model": model.config.name_or_path,
                **config.to_dict(),
                "chosen": None if choice is None else choice.to_dict(),
                "device": str(device),
                "dtype": str(targets[0].module.weight.dtype).removeprefix("torch."),
            },
            matrices=[*rows, *map(_skipped_row, skipped)],
            block_parameters=counts.block_parameters,
            model_parameters=counts.parameters,
            model_zeros=counts.zeros,
            perplexity=None
            if texts.evaluation is None
            else {"dense": dense, "pruned": pruned, **protocol(texts.evaluation, texts.bos, tokenizer)},
            seconds=dict(stage.seconds),
            peak_memory_bytes=_peak_memory(stage, device),
            energy=energy.result,
            energy_details=energy.to_dict(),
            versions=versions(device),
            tokens_sha256=_calibration_sha256(texts, statistics),
            bos=texts.bos,
            warnings=list(stage.notes),
            omega_floored_rows=count_floored_rows(statistics) if _uses_floor(settled, scales) else None,
            check=check,
            passes=None if passes is None else asdict(passes),
            row_histogram=row_histogram,
        )
    return report, choice


def collect(
    model: nn.Module, tokenizer=None, *, config: PruneConfig, calibration=None, progress: bool = True
) -> Statistics:
    """Measures statistics for any sparsity, pattern and allocation of wanda and fwanda.

    One forward and one backward pass over the text serve them all.

    Args:
        model, tokenizer, config, calibration, progress: as prune(). Of the settings those of the text, of the Fisher
            information and of the passes count.

    Raises:
        UserError: as prune().
    """
    names = settings_of("text", "bos", "fisher", "passes")
    config = PruneConfig(**{name: getattr(config, name) for name in names})
    stage = Stages(RunState(), model_device(model))
    with stage.noting(), evaluating(model), device_rules(model, config):
        config = with_sources(config, calibration, None, None)
        targets, _ = plan(model, config)
        engine = ResidentEngine(model, targets, PassSettings.of(config), progress=progress)
        sources = sources_of(config, calibration, None, None)
        texts = read_texts(config, model, tokenizer, sources, calibration=True)
        return _measured(stage, engine, config, texts, config.fisher)


def evaluate_model(model: nn.Module, tokenizer, *, config: PruneConfig, progress: bool = True) -> dict:
    """Perplexity of a model as it is, with its protocol, and the zeros it holds.

    Args:
        model, tokenizer: a causal language model and its tokenizer.
        config: eval, eval_seqlen (default: seqlen), eval_windows and bos count.
        progress: show a bar.

    Returns:
        {"perplexity": float, seqlen, windows, tokens_sha256, bos, tokenizer,
        "sparsity": {"matrices": over the prunable matrices, "model": over all parameters}}; the sparsity alone where
        config.eval is None.

    Raises:
        UserError: as prune().
    """
    stage = Stages(RunState(), model_device(model))
    with stage.noting(), evaluating(model):
        config = with_sources(config, None, None, None)
        targets, _ = plan(model, config)
        engine = ResidentEngine(model, targets, progress=progress)
        sources = sources_of(config, None, None, None)
        texts = read_texts(config, model, tokenizer, sources, calibration=False)
        found: dict = {}
        if texts.evaluation is not None:
            value = _perplexity(engine, texts.evaluation, "model perplexity")
            found = {"perplexity": value, **protocol(texts.evaluation, texts.bos, tokenizer)}
        return found | {"sparsity": _zero_shares(count_weights(engine))}


def plan(model: nn.Module, config: PruneConfig) -> tuple[list[Target], list[Skipped]]:
    """The targets of a model and what is left alone, after all checks that need no text.

    Raises:
        UserError: as prune().
    """
    if hasattr(model, "_orig_mod"):
        raise UserError("the model is a wrapper of torch.compile; give the model itself, model._orig_mod")
    if config.nm and not config.responds and config.method == "fwanda":
        warnings.warn(
            f"row budgets have no effect inside an n:m group, so fwanda with {config.pattern} equals wanda with "
            f"{config.pattern}; --allocation response also weighs columns and differs",
            stacklevel=2,
        )
    if config.weighs_tokens and config.allocation != "uniform":
        warnings.warn(f"--allocation {config.allocation} has no effect with --pattern {config.pattern}", stacklevel=2)
    targets, skipped = select_targets(*find_targets(model), config)
    check_model(model, targets, config)
    check_finite(ResidentEngine(model, targets))
    return targets, skipped


def _check_given(config: PruneConfig, model: nn.Module, statistics: Statistics | None) -> None:
    """Refuses given statistics that the run cannot use.

    Raises:
        UserError: saying why.
    """
    if statistics is None:
        return
    if not config.reads_statistics:
        raise UserError(
            f"--method {config.method} in --order {config.order} uses no statistics; leave --statistics out"
        )
    if config.needs_fisher and statistics.fisher not in (None, config.fisher):
        raise UserError(
            f"--fisher {config.fisher} contradicts the statistics, which are of --fisher {statistics.fisher}; "
            f"leave --fisher out, or measure others by fwanda calibrate"
        )
    targets, _ = find_targets(model)
    weights = fingerprint(ResidentEngine(model, targets))
    statistics.check(targets, fisher=config.needs_fisher, weights=weights)


def _identify(
    state: RunState | None, stage: Stages, config, engine, sources: Sources, statistics: Statistics | None
) -> None:
    """Says what a run and the one that resumes it must have in common."""
    if state is None:
        return
    values = {"statistics": None if statistics is None else statistics.fingerprint(), "weights": fingerprint(engine)}
    state.identify({**values, **config.to_dict(), **sources.identity(), **versions(engine.device)})
    if state.resumed:
        stage.notes.append("resumed: seconds and energy are those of the last part")


def _dense_perplexity(stage: Stages, engine: ResidentEngine, texts: Texts) -> float | None:
    if texts.evaluation is None:
        return None
    dense = stage(
        StageName.EVAL_DENSE, partial(_perplexity, engine, texts.evaluation, "dense perplexity"), codecs.NUMBER
    )
    note = check_dense(dense, engine.model.config.get_text_config().vocab_size)
    if note:
        warnings.warn(note, stacklevel=2)
    return dense


def _perplexity(engine: ResidentEngine, windows: Tensor, label: str) -> float:
    return perplexity(engine.model, windows, progress=engine.progress, label=label)


def _statistics(
    stage: Stages, engine: ResidentEngine, config: PruneConfig, texts: Texts, given: Statistics | None
) -> tuple[Statistics | None, PassRecord | None]:
    """The given statistics, or those that the method needs, or None; and how their windows ran in this run."""
    if given is not None:
        if texts.calibration is not None and tokens_sha256(texts.calibration) != given.tokens_sha256:
            warnings.warn("the statistics were measured on another text than --calibration", stacklevel=2)
        return given.to(engine.device), None
    if not config.reads_statistics:
        return None, None
    statistics = _measured(stage, engine, config, texts, config.fisher if config.needs_fisher else None)
    return statistics, PassRecord(**statistics.passes)


def _measured(
    stage: Stages, engine: ResidentEngine, config: PruneConfig, texts: Texts, fisher: str | None
) -> Statistics:
    def compute() -> Statistics:
        statistics = measure_statistics(
            engine, texts.calibration, fisher=fisher, seed=config.seed, partial=stage.partial(StageName.CALIBRATE)
        )
        text = {name: getattr(config, name) for name in settings_of("text")}
        return replace(statistics, tokens_sha256=tokens_sha256(texts.calibration), bos=texts.bos, text=text)

    return stage(StageName.CALIBRATE, compute, codecs.statistics_codec(engine.device))


def _token_sq_grads(
    stage: Stages, engine: ResidentEngine, config: PruneConfig, texts: Texts
) -> tuple[dict[str, Tensor], PassRecord]:
    return stage(
        StageName.CALIBRATE,
        lambda: measure_token_sq_grads(
            engine,
            texts.calibration,
            fisher=config.fisher,
            seed=config.seed,
            partial=stage.partial(StageName.CALIBRATE),
        ),
        codecs.token_sq_grads_codec(engine.device),
    )


def _choice(
    stage: Stages, engine: ResidentEngine, config: PruneConfig, texts: Texts, statistics: Statistics | None
) -> Choice | None:
    """What the search of the allocation chose; None where the settings name one."""
    if not config.responds:
        return None
    if not texts.held_out.unread:
        warnings.warn(
            "no calibration text is left to choose on: the allocation is chosen on its last windows", stacklevel=2
        )
    rounds = stage.steps(StageName.CHOOSE, codecs.round_codec(engine.device))
    return stage(
        StageName.CHOOSE,
        lambda: choose(engine, texts.calibration, texts.held_out.tokens, statistics, config, rounds=rounds),
        codecs.choice_codec(engine.device),
    )


def _wanda_loss(
    stage: Stages,
    engine: ResidentEngine,
    config: PruneConfig,
    held_out: HeldOut | None,
    statistics: Statistics | None,
) -> float | None:
    """The loss of Wanda's masks on held-out text, before anything is pruned; None where it is not compared."""
    if not config.checks or held_out is None:
        return None
    wanda = replace(config, method="fwanda", allocation="uniform")
    return stage(
        StageName.CHECK,
        lambda: engine.mean_loss(held_out.tokens, masks_of(wanda, engine, statistics)),
        codecs.NUMBER,
    )


def _compare(
    stage: Stages, engine: ResidentEngine, config: PruneConfig, held_out: HeldOut | None, wanda: float | None
) -> dict | None:
    """Report.check: the losses of the pruned model and of Wanda's masks. Warns where Wanda's is lower."""
    if wanda is None:
        return None
    pruned = stage(StageName.CHECK, lambda: engine.mean_loss(held_out.tokens))
    if math.isfinite(wanda) and pruned > wanda:
        where = "held-out calibration text" if held_out.unread else "calibration text"
        advice = "" if config.responds else "; try --allocation auto"
        warnings.warn(
            f"worse than Wanda on {where}: a loss of {pruned:.3f}, where Wanda's masks give {wanda:.3f}{advice}",
            stacklevel=2,
        )
    finite = [loss if math.isfinite(loss) else None for loss in (pruned, wanda)]
    return {"wanda": finite[1], "held_out": held_out.unread, "pruned": finite[0]}


def _calibration_sha256(texts: Texts, statistics: Statistics | None) -> str | None:
    if texts.calibration is not None:
        return tokens_sha256(texts.calibration)
    return None if statistics is None else statistics.tokens_sha256


def _uses_floor(config: PruneConfig, scales) -> bool:
    """Whether omega is raised to a floor: in row budgets, and in F-SparseGPT's weights of rows."""
    return scales is None and config.needs_fisher and (config.facts.weighs_rows or config.allocation == "row")


def _skipped_row(item: Skipped) -> MatrixRow:
    size = sum(p.numel() for p in item.parameters)
    return MatrixRow(item.name, item.shape, size, size, sum(count_zeros(item.parameters)), skipped=item.reason)


def _zero_shares(counts: WeightCounts) -> dict[str, float]:
    return {
        "matrices": counts.target_zeros / counts.target_parameters,
        "model": counts.zeros / counts.parameters,
    }


def _peak_memory(stage: Stages, device: torch.device) -> int:
    if device.type == "cuda":
        return stage.peak_bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
