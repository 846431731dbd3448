"""The stages of a run, one function each. `pipeline.run_prune` calls them in order.

Each takes `stage`, which times it and brings back its result from an interrupted run, and returns plain values.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from ..allocate.budgets import ScoreScales, keep_budgets
from ..allocate.judge import Judge, Losses, domain_losses
from ..allocate.masks import masks_of, pack
from ..allocate.search import Choice, choose, wanda_config
from ..config import PruneConfig
from ..engine.all_weights import fingerprint
from ..engine.engine import Engine, make_engine
from ..engine.loop import PassRecord
from ..errors import UserError
from ..evaluate.perplexity import check_dense, engine_perplexity
from ..measure.statistics import Statistics, check_uses_statistics, measure_statistics
from ..measure.token_weights import measure_token_sq_grads
from ..methods.block_loop import prune_blocks
from ..methods.job import Inputs
from ..methods.refit import Refit
from ..model.targets import find_targets
from ..notes import warn
from ..report.record import MatrixRow, versions
from ..stage_names import StageName
from ..text.domains import Domain, spread_evenly
from ..text.own_text import sample_tokens, start_token_of
from ..text.tokenizer_hash import tokenizer_sha256
from ..text.windows import tokens_sha256
from . import codecs
from .energy import EnergyMeter
from .read_texts import own_seed, own_windows, read_texts
from .stage import Stages
from .state import RunState
from .texts import TOKENS, Sources, Texts

_SHOWN = 0.001  # nats: smaller differences between losses are not shown


def check_given(config: PruneConfig, model: nn.Module, given: Statistics | None) -> None:
    """Refuses given statistics that the run cannot use.

    Raises:
        UserError: saying why.
    """
    if given is None:
        return
    check_uses_statistics(config)
    if config.needs_fisher and given.fisher not in (None, config.fisher):
        raise UserError(
            f"--fisher {config.fisher} contradicts the statistics, which are of --fisher {given.fisher}; "
            f"leave --fisher out, or measure others by fwanda calibrate"
        )
    targets, _ = find_targets(model)
    given.check(targets, fisher=config.needs_fisher, weights=fingerprint(make_engine(model, targets, config)))


def identify(
    state: RunState, config: PruneConfig, engine: Engine, tokenizer, sources: Sources, given: Statistics | None
) -> None:
    """Tells the state what this run must have in common with the interrupted run that it resumes.

    Raises:
        UserError: they differ.
    """
    ranks = engine.ranks
    if state.folder is None and ranks.size == 1:
        return
    inputs = {"statistics": None if given is None else given.fingerprint(), "weights": fingerprint(engine)}
    facts = {**inputs, **config.without("energy", "save"), **versions(engine.device)}
    facts["dtype"] = str(engine.model.dtype).removeprefix("torch.")  # the fingerprint is the same in every dtype
    facts["tokenizer"] = tokenizer_sha256(tokenizer)
    ranks.check_same(lambda: {**facts, "engine": engine.name})
    facts |= sources.identity()
    ranks.share(lambda: state.identify({**facts, "started": ranks.started}) if state.folder else None)
    if state.resumed:
        state.notes.append("resumed: seconds and energy are those of the last part")


def reads(config: PruneConfig, given: Statistics | None) -> dict[str, bool]:
    """Whether a run reads calibration text and domains: the arguments of these names of read_texts()."""
    measures = config.reads_statistics and given is None
    return {
        "calibration": config.runs_blocks or config.responds or measures,
        "domains": config.responds or not config.no_check,
    }


def own_text(
    stage: Stages,
    engine: Engine,
    config: PruneConfig,
    tokenizer,
    given: Tensor | None = None,
    *,
    calibration: bool,
    domains: bool,
) -> tuple[Tensor | None, dict]:
    """The windows of text that the model writes itself.

    Args:
        given: [S, L] int64 windows that the model wrote for an earlier run; taken if they are enough.
        calibration, domains: as read_texts().

    Returns:
        [S, L] int64 windows, None if the run reads no such text; and their energy, as EnergyMeter.to_dict()["phases"].

    Raises:
        UserError: there is no tokenizer, or as start_token_of() and sample_tokens().
    """
    count = own_windows(config, calibration=calibration, domains=domains)
    if not count:
        return None, {}
    if given is not None and len(given) >= count:
        return given[:count], {}
    if tokenizer is None:
        raise UserError("the text 'self' needs a tokenizer, got none: pass one, or name another text")
    start = start_token_of(engine.model, tokenizer, config.start_token)
    tokens, energy = sampled(stage, engine, config, start, count)
    return tokens, energy.to_dict()["phases"]


def sampled(
    stage: Stages, engine: Engine, config: PruneConfig, start_token: int, count: int
) -> tuple[Tensor, EnergyMeter]:
    """[count, L] int64 windows that the model writes after a start token, and the meter of their energy.

    Raises:
        UserError: the weights are divided over ranks.
    """
    if engine.name == "sharded":
        raise UserError("the model writes no text with --engine sharded; use another text than 'self'")
    if engine.name == "streamed":
        warn(
            "the model writes text with --engine streamed, which loads all weights for each token; where they fit the "
            "device, `fwanda sample` writes the same text faster, for --calibration FILE"
        )
    with stage.metered(EnergyMeter(engine.device, config.energy)) as energy, engine.running():
        tokens = stage(
            StageName.SAMPLE,
            lambda: sample_tokens(
                engine.model,
                start_token=start_token,
                nsamples=count,
                seqlen=config.seqlen,
                seed=own_seed(config),
                ranks=engine.ranks,
                records=engine.name != "streamed",
                progress=engine.progress,
                unfinished=stage.unfinished(StageName.SAMPLE),
            ),
            codecs.TOKENS,
        )
    return tokens, energy


def texts(
    stage: Stages,
    engine: Engine,
    config: PruneConfig,
    tokenizer,
    sources: Sources,
    own: Tensor | None,
    *,
    calibration: bool,
    domains: bool,
) -> Texts:
    """What the run reads; the arguments are those of read_texts()."""
    wanted = {"calibration": calibration, "domains": domains}
    return stage(StageName.TEXT, lambda: read_texts(config, engine, tokenizer, sources, own, **wanted), codecs.TEXTS)


def dense_perplexity(stage: Stages, engine: Engine, texts: Texts) -> dict[str, float]:
    """Perplexity before pruning on each evaluation text, with a warning for each that is suspicious."""
    dense = _perplexities(stage, StageName.EVAL_DENSE, engine, texts, "dense")
    vocabulary = engine.model.config.get_text_config().vocab_size
    for source, value in dense.items():
        if note := check_dense(value, vocabulary, source):
            warn(note)
    return dense


def statistics(
    stage: Stages, engine: Engine, config: PruneConfig, texts: Texts, given: Statistics | None
) -> tuple[Statistics | None, PassRecord | None]:
    """The given statistics, or those that the method needs, or None; and how their windows ran in this run."""
    if given is not None:
        if texts.calibration is not None and tokens_sha256(texts.calibration) != given.tokens_sha256:
            warn("the statistics were measured on another text than --calibration")
        return given.to(engine.device), None
    if not config.reads_statistics:
        return None, None
    fisher = config.fisher if config.needs_fisher else None
    measured = measured_statistics(stage, engine, config, texts, fisher)
    return measured, PassRecord(**measured.passes)


def measured_statistics(
    stage: Stages, engine: Engine, config: PruneConfig, texts: Texts, fisher: str | None
) -> Statistics:
    """Statistics of the dense model on the calibration text."""

    def compute() -> Statistics:
        measured = measure_statistics(
            engine,
            texts.calibration,
            fisher=fisher,
            fisher_windows=spread_evenly(texts.labels, config.fisher_count),
            seed=config.seed,
            unfinished=partial(stage.unfinished, StageName.CALIBRATE),
        )
        text = config.select("text")
        text["calibration"] = list(text["calibration"])
        bos = None if config.calibration == (TOKENS,) else texts.bos
        read = {"tokens_sha256": tokens_sha256(texts.calibration), "bos": bos, "text": text}
        return replace(measured, **read, fisher_samples=config.fisher_samples)

    return stage(StageName.CALIBRATE, compute, codecs.statistics_codec(engine.device))


def judge(
    stage: Stages,
    engine: Engine,
    config: PruneConfig,
    texts: Texts,
    statistics: Statistics | None,
    given: Choice | None,
) -> Judge | None:
    """What compares masks; None if nothing is chosen.

    Args:
        given: the choice of another run. The search is then left out, and only updates of weights are compared.
    """
    if not config.responds or (given is not None and not config.traits.updates_weights):
        return None
    wanda = masks_of(wanda_config(config), engine, statistics)
    return stage(StageName.CHOOSE, lambda: Judge(engine, texts.domains, wanda))


def choice(
    stage: Stages,
    engine: Engine,
    config: PruneConfig,
    texts: Texts,
    statistics: Statistics | None,
    judge: Judge | None,
    earlier: Choice | None,
) -> Choice | None:
    """What the search of "response" or "auto" chose; None without a search.

    Args:
        judge: from judge().
        earlier: the choice of another run with the same masks. It is taken, and the search is left out.
    """
    if earlier is not None:
        stage.notes += [note for note in earlier.notes if note not in stage.notes]
        return earlier
    if not config.responds:
        return None
    noted = len(stage.notes)
    rounds = stage.steps(StageName.CHOOSE, codecs.round_codec(engine.device))
    chosen = stage(
        StageName.CHOOSE,
        lambda: choose(engine, texts.calibration, judge, statistics, config, rounds=rounds),
        codecs.choice_codec(engine.device),
    )
    return replace(chosen, notes=tuple(stage.notes[noted:]))


def budgets(
    stage: Stages,
    engine: Engine,
    config: PruneConfig,
    statistics: Statistics | None,
    scales: ScoreScales | None,
    *,
    searched: bool,
) -> dict[str, Tensor] | None:
    """Weights kept in each row; None where a pattern or the OBS walk decides.

    Args:
        searched: whether a search has fixed the masks.
    """
    if config.nm or not (searched or config.needs_budgets):
        return None
    return stage(
        StageName.BUDGETS,
        lambda: keep_budgets(config, engine, statistics, scales),
        codecs.budgets_codec(engine.device),
    )


def refit(
    engine: Engine,
    config: PruneConfig,
    statistics: Statistics | None,
    judge: Judge | None,
    scales: ScoreScales | None,
) -> Refit | None:
    """What decides in which blocks the update of the weights is kept, after a search; None if all updates are kept."""
    if judge is None or not config.traits.updates_weights:
        return None
    return Refit(judge, pack(engine, masks_of(config, engine, statistics, scales)))


def losses_before(
    stage: Stages, engine: Engine, config: PruneConfig, texts: Texts, statistics: Statistics | None
) -> dict[str, Losses] | None:
    """Losses of each domain before anything is pruned; None if nothing is compared.

    Under "dense" those of the dense model. Under "wanda" those of Wanda's masks, if the result may differ from them.
    """
    if config.no_check or not texts.domains:
        return None

    def compute() -> dict[str, Losses]:
        losses = {"dense": domain_losses(engine, _reported(texts))}
        if config.compares_with_wanda:
            masks = masks_of(wanda_config(config), engine, statistics)
            losses["wanda"] = domain_losses(engine, _reported(texts), masks)
        return losses

    return stage(StageName.CHECK, compute, codecs.VALUES)


def _reported(texts: Texts) -> dict[str, Tensor]:
    return {domain.source: domain.reported for domain in texts.domains}


def token_sq_grads(
    stage: Stages, engine: Engine, config: PruneConfig, texts: Texts
) -> tuple[dict[str, Tensor] | None, PassRecord | None]:
    """Squared gradients of the tokens, and how their windows ran; None where tokens are not weighed."""
    if not config.weighs_tokens:
        return None, None
    return stage(
        StageName.CALIBRATE,
        lambda: measure_token_sq_grads(
            engine,
            texts.calibration,
            fisher=config.fisher,
            seed=config.seed,
            unfinished=stage.unfinished(StageName.CALIBRATE),
        ),
        codecs.token_sq_grads_codec(engine.device),
    )


def pruned_blocks(
    stage: Stages, engine: Engine, config: PruneConfig, inputs: Inputs
) -> tuple[list[MatrixRow], list[int], dict | None]:
    """Prunes the model; the rows of the record, Report.row_histogram and Report.refit."""
    blocks = stage.steps(StageName.PRUNE, codecs.BLOCK)
    return stage(StageName.PRUNE, lambda: prune_blocks(engine, config, inputs, blocks))


def domains(
    stage: Stages, engine: Engine, config: PruneConfig, texts: Texts, before: dict[str, Losses] | None
) -> list[dict]:
    """Report.domains: losses of the dense and the pruned model, with a warning where Wanda's masks are better."""
    if before is None:
        return []
    pruned = stage(StageName.CHECK, lambda: domain_losses(engine, _reported(texts)))
    wanda = before.get("wanda", pruned if config.gives_wandas_masks else {})
    rows = []
    for domain in texts.domains:
        name = domain.source
        losses = {"dense": before["dense"][name], "wanda": wanda.get(name, math.inf), "pruned": pruned[name]}
        if math.isfinite(losses["wanda"]) and losses["pruned"] - losses["wanda"] >= _SHOWN:
            warn(_worse_than_wanda(config, domain, losses))
        finite = {key: loss if math.isfinite(loss) else None for key, loss in losses.items()}
        facts = {"source": name, "calibrated": domain.calibrated, "unread": domain.unread}
        rows.append({**facts, "windows": len(domain.reported), **finite})
    return rows


def _worse_than_wanda(config: PruneConfig, domain: Domain, losses: Losses) -> str:
    where = domain.source if domain.unread else f"{domain.source} (windows of the calibration)"
    advice = "; try --allocation auto"
    if not domain.calibrated:
        advice = f"; add that text to the calibration: --calibration {domain.source}"
    elif config.responds:
        advice = "; give it a larger share of the calibration, or take --method wanda"
    return (
        f"worse than Wanda on {where}: the loss is {losses['pruned']:.3f}, with Wanda's masks {losses['wanda']:.3f}"
        f"{advice}"
    )


def pruned_perplexity(stage: Stages, engine: Engine, texts: Texts) -> dict[str, float]:
    """Perplexity after pruning on each evaluation text."""
    return _perplexities(stage, StageName.EVAL_PRUNED, engine, texts, "pruned")


def _perplexities(stage: Stages, name: StageName, engine: Engine, texts: Texts, which: str) -> dict[str, float]:
    """source -> perplexity of the model as it is; a resumed run goes on with the first text that is missing."""
    if not texts.evaluation:
        return {}
    finished = stage.steps(name, codecs.NUMBER)

    def compute() -> dict[str, float]:
        found = {}
        for index, (source, windows) in enumerate(texts.evaluation.items()):
            value = finished.load(index)
            if value is None:
                value = engine_perplexity(engine, windows, label=f"{which} perplexity, {source}")
                finished.save(index, value)
            found[source] = value
        return found

    return stage(name, compute, codecs.VALUES)
