"""prune(), collect() and evaluate_model(): the stages in order, and the facts they leave behind."""

from __future__ import annotations

import math
import resource
import warnings
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from ..allocate import choose
from ..allocate.budgets import Factors, count_floored_rows, keep_budgets, threshold_budgets
from ..allocate.masks import masked_loss, masks_of, mean_loss
from ..allocate.response import ROUNDS, respond
from ..config import PASS_SETTINGS, TEXT_NUMBERS, PruneConfig
from ..engine.device import device_rules, model_device
from ..engine.loop import PassSettings
from ..errors import UserError
from ..evaluate import perplexity as evaluate
from ..measure.statistics import Statistics, calibrate, fingerprint
from ..measure.token_weights import token_energies
from ..methods.prune import Job, prune_targets
from ..model.experts import run_split
from ..model.targets import Skipped, Target, check_model, find_blocks, find_targets, select_targets
from ..report.record import MatrixRow, Report, versions
from ..text import windows as data
from .energy import EnergyMeter
from .stage import Stages
from .state import RunState
from .texts import Texts, protocol, with_sources

_TEXT_SETTINGS = ("calibration", *TEXT_NUMBERS)


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
    """Prune a causal language model in place.

    Args:
        model: a Hugging Face causal language model with floating-point weights, on the device to work on.
        tokenizer: its tokenizer; not needed when all text is given as token ids.
        config: the settings; or give them by name in **settings.
        statistics: of this dense model, from collect(); the forward and backward pass is then left out.
        calibration: overrides config.calibration; may be token ids [S, L] int64, used as they are.
        eval: overrides config.eval; may be token ids [S, L] int64.
        state: keeps finished stages, and those that an interrupted run kept are not done again.
        progress: show bars, where standard error is a terminal.
        **settings: fields of PruneConfig, e.g. method="fwanda", allocation="global", sparsity=0.5.

    Returns:
        The report of the run; save it with the model by save_pruned().

    Raises:
        UserError: a setting, the text or the model does not allow it; the message is one line.
        TypeError: both config and settings are given.
    """
    if config is not None and settings:
        raise TypeError(f"give either config or settings, got both (settings: {', '.join(settings)})")
    config = config or PruneConfig.from_dict(settings)
    stages = Stages()
    with stages.noting(), evaluate.evaluating(model), device_rules(model, config):
        run = _Run(config, model, tokenizer, calibration, eval, statistics, stages, progress, state)
        return run.prune()


def collect(
    model: nn.Module, tokenizer=None, *, config: PruneConfig, calibration=None, progress: bool = True
) -> Statistics:
    """Statistics for any sparsity, pattern and allocation of wanda and fwanda, from one forward and backward pass.

    Args:
        model, tokenizer, config, calibration, progress: as prune(); of the config the settings of the text, of fisher
            and of the passes count.

    Raises:
        UserError: as prune().
    """
    stages = Stages()
    kept = ("fisher", "bos", *_TEXT_SETTINGS, *PASS_SETTINGS)
    text = PruneConfig(**{name: getattr(config, name) for name in kept})
    with stages.noting(), evaluate.evaluating(model), device_rules(model, text):
        return _Run(text, model, tokenizer, calibration, None, None, stages, progress).collect()


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
    stages = Stages()
    with stages.noting(), evaluate.evaluating(model):
        run = _Run(config, model, tokenizer, None, None, None, stages, progress)
        windows = run.texts.read(calibration=False)
        value = run.perplexity(windows, "model")
    return {
        **({} if windows is None else {"perplexity": value, **protocol(windows, run.texts.bos, tokenizer)}),
        "sparsity": {
            "matrices": _zero_share([t.weight for t in run.targets]),
            "model": _zero_share(list(model.parameters())),
        },
    }


def plan(model: nn.Module, config: PruneConfig) -> tuple[list[Target], list[Skipped]]:
    """The targets of a model and what is left alone, after all checks that need no text.

    Raises:
        UserError: as prune().
    """
    if hasattr(model, "_orig_mod"):
        raise UserError("the model is a wrapper of torch.compile; give the model itself, model._orig_mod")
    if config.nm and not config.responds and config.method == "fwanda":
        warnings.warn(
            f"fwanda under {config.pattern} is exactly wanda's {config.pattern}: a factor for each row cancels inside "
            f"a group; --allocation response acts there",
            stacklevel=2,
        )
    if config.weighs_tokens and config.allocation != "uniform":
        warnings.warn(f"--allocation {config.allocation} divides nothing under {config.pattern}", stacklevel=2)
    targets, skipped = select_targets(*find_targets(model), config)
    check_model(model, targets, config)
    return targets, skipped


class _Run:
    """One call of prune(), collect() or evaluate_model()."""

    def __init__(
        self, config: PruneConfig, model, tokenizer, calibration, eval, statistics, stages, progress: bool, state=None
    ):
        self.config = with_sources(config, calibration, eval, statistics)
        self.texts = Texts(self.config, model, tokenizer, calibration, eval, stages)
        self.model, self.given = model, statistics
        self.stages, self.progress = stages, progress
        self.state: RunState = state or RunState()
        self.state.notes = stages.notes
        self.device = stages.device = model_device(model)
        self.chosen: dict | None = None
        self.factors: Factors | None = None
        self.passes: dict | None = None
        self.targets, self.skipped = plan(model, self.config)

    def prune(self) -> Report:
        config = self.config
        self._check_given()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.state.identify(self._identity())
        if self.state.resumed:
            self.stages.notes.append("resumed: seconds and energy are those of the last part")
        measures = config.reads_statistics and self.given is None
        calibration = config.runs_blocks or config.responds or measures
        windows = self.texts.recalled(self.state, calibration=calibration)
        dense = self._dense_perplexity(windows)
        if dense is not None:
            note = evaluate.check_dense(dense, self.model.config.get_text_config().vocab_size)
            if note:
                warnings.warn(note, stacklevel=2)
        with EnergyMeter(self.device, protocol=self.config.energy) as energy, self._split_experts():
            self.stages.meter = energy
            statistics, budgets = self._statistics(), None
            config = self._settled(statistics)
            if config.needs_budgets:
                with self.stages.timed("budgets"):
                    budgets = self._budgets(config, statistics)
            check = self._check_begins(config, statistics)
            energies = self._energies() if config.weighs_tokens else None
            with self.stages.timed("prune"):
                rows = prune_targets(
                    Job(
                        config=config,
                        model=self.model,
                        targets=self.targets,
                        tokens=self.texts.tokens,
                        statistics=statistics,
                        budgets=budgets,
                        factors=self.factors,
                        energies=energies,
                        progress=self.progress,
                        state=self.state,
                    )
                )
            if check is not None:
                self._check_ends(check)
        self.stages.meter = None
        pruned = self.perplexity(windows, "pruned")
        return self._report(config, rows, statistics, windows, dense, pruned, energy, check)

    def _identity(self) -> dict:
        """What a run and the one that goes on with it must have in common."""
        given = None if self.given is None else self.given.fingerprint()
        facts = {"statistics": given, "weights": fingerprint(self.targets)}
        return {**facts, **self.config.to_dict(), **self.texts.identity(), **versions(self.device)}

    def _dense_perplexity(self, windows: Tensor | None) -> float | None:
        if windows is None:
            return None
        if (kept := self.state.recall("dense")) is not None:
            return kept[1]["perplexity"]
        dense = self.perplexity(windows, "dense")
        self.state.keep("dense", {}, {"perplexity": dense})
        return dense

    def _settled(self, statistics: Statistics | None) -> PruneConfig:
        """The config with the allocation that is found best; the losses that decide go into the report.

        Under "response" that is itself, with self.factors; under "auto" it can be another.
        """
        config = self.config
        if not config.responds:
            return config
        found = choose.candidates(config)
        if (kept := self.state.recall("chosen")) is not None:
            tensors, self.chosen = kept
            if tensors:
                self.factors = Factors.of_tensors(tensors, self.device)
        else:
            with self.stages.timed("choose"):
                self.chosen, self.factors = self._choose(statistics, found)
            self.state.keep("chosen", self.factors.tensors() if self.factors else {}, self.chosen)
            for index in range(ROUNDS):
                self.state.forget(f"round-{index}")
        if self.factors is None:
            return found[self.chosen["name"]]
        return replace(found[self.chosen["start"]], allocation="response")

    def _choose(self, statistics: Statistics, found: dict[str, PruneConfig]) -> tuple[dict, Factors | None]:
        """{"name": the best, "start": what the rounds begin with, "losses"}; and the factors if a round is best."""
        held_out, unread = self.texts.held_out
        if not unread:
            warnings.warn(
                "no calibration text is left to choose on: the allocation is chosen on its last windows", stacklevel=2
            )
        losses = choose.try_masks(self.model, held_out, self.targets, statistics, found, progress=self.progress)
        start = min((name for name in losses if found[name].allocation == "global"), key=losses.get)
        factors = None
        if math.isfinite(losses[start]):
            factors, rounds = respond(
                self.model,
                self.texts.tokens,
                held_out,
                self.targets,
                statistics,
                found[start],
                losses[start],
                settings=PassSettings.of(self.config),
                state=self.state,
                progress=self.progress,
            )
            losses |= rounds
        name = choose.best(losses)
        chosen = {"name": name, "start": start, "losses": {k: v for k, v in losses.items() if math.isfinite(v)}}
        return chosen, None if name in found else factors

    def _check_begins(self, config: PruneConfig, statistics: Statistics | None) -> dict | None:
        """The loss of Wanda's masks on held-out text, before anything is pruned; None where there is no check."""
        if not config.checks:
            return None
        if (kept := self.state.recall("check")) is not None:
            return kept[1]
        with self.stages.timed("check"):
            try:
                tokens, unread = self.texts.held_out
            except UserError as error:
                warnings.warn(f"the result was not compared with Wanda's: {error}", stacklevel=2)
                return None
            masks = masks_of(replace(config, method="fwanda", allocation="uniform"), self.targets, statistics)
            loss = masked_loss(self.model, tokens, self.targets, masks)
        check = {"wanda": loss if math.isfinite(loss) else None, "held_out": unread}
        self.state.keep("check", {}, check)
        return check

    def _check_ends(self, check: dict) -> None:
        """Add the loss of the pruned model, and warn where Wanda's is lower."""
        check["pruned"] = None
        with self.stages.timed("check"):
            try:
                loss = mean_loss(self.model, self.texts.held_out[0])
            except UserError as error:  # of the text, which an interrupted run could still read
                warnings.warn(f"the result was not compared with Wanda's: {error}", stacklevel=2)
                return
        check["pruned"] = loss if math.isfinite(loss) else None
        if check["wanda"] is not None and loss > check["wanda"]:
            where = "held-out calibration text" if check["held_out"] else "calibration text"
            advice = "" if self.config.responds else "; try --allocation auto"
            warnings.warn(
                f"worse than Wanda on {where}: a loss of {loss:.3f}, where Wanda's masks give "
                f"{check['wanda']:.3f}{advice}",
                stacklevel=2,
            )

    def _budgets(self, config: PruneConfig, statistics: Statistics | None) -> dict[str, Tensor]:
        if (kept := self.state.recall("budgets")) is not None:
            return {name: budget.to(self.device) for name, budget in kept[0].items()}
        if self.factors is None:
            budgets = keep_budgets(config, self.targets, statistics)
        else:
            budgets = threshold_budgets(config, self.targets, statistics, self.factors)
        self.state.keep("budgets", budgets)
        return budgets

    def collect(self) -> Statistics:
        self.texts.read(calibration=True)
        with self._split_experts():
            return self._calibrated(self.config.fisher)

    def _split_experts(self):
        return run_split(t.slice_of.experts for t in self.targets if t.slice_of is not None)

    def _check_given(self) -> None:
        config = self.config
        if self.given is None:
            return
        if not config.reads_statistics:
            raise UserError(
                f"--method {config.method} in --order {config.order} uses no statistics; leave --statistics out"
            )
        if config.needs_fisher and self.given.fisher not in (None, config.fisher):
            raise UserError(
                f"--fisher {config.fisher} contradicts the statistics, which are of --fisher {self.given.fisher}; "
                f"leave --fisher out, or measure others by fwanda calibrate"
            )
        self.given.check(find_targets(self.model)[0], fisher=config.needs_fisher)
        if self.given.bos is not None:
            if self.texts.bos not in (None, self.given.bos):
                raise UserError(f"--bos {config.bos} contradicts the statistics, which were measured otherwise")
            self.texts.bos = self.given.bos

    def _statistics(self) -> Statistics | None:
        """The given statistics, or those that the method needs, or None."""
        config = self.config
        if self.given is not None:
            if self.texts.tokens is not None and data.tokens_sha256(self.texts.tokens) != self.given.tokens_sha256:
                warnings.warn("the statistics were measured on another text than --calibration", stacklevel=2)
            return self.given.to(self.device)
        if not config.reads_statistics:
            return None
        return self._calibrated(config.fisher if config.needs_fisher else None)

    def _calibrated(self, fisher: str | None) -> Statistics:
        if (kept := self.state.recall("statistics")) is not None:
            statistics = Statistics.of_parts(*kept).to(self.device)
            self.passes = statistics.passes
            return statistics
        with self.stages.timed("calibrate"):
            statistics = calibrate(
                self.model,
                self.texts.tokens,
                self.targets,
                fisher=fisher,
                seed=self.config.seed,
                settings=PassSettings.of(self.config),
                state=self.state,
                progress=self.progress,
            )
            statistics.check(self.targets, fisher=fisher is not None)
        self.passes = statistics.passes
        statistics.tokens_sha256, statistics.bos = data.tokens_sha256(self.texts.tokens), self.texts.bos
        statistics.text = {k: getattr(self.config, k) for k in _TEXT_SETTINGS}
        self.state.keep("statistics", *statistics.parts())
        self.state.forget("calibration")
        return statistics

    def _energies(self) -> dict[str, Tensor]:
        if (kept := self.state.recall("energies")) is not None:
            energies, self.passes = kept
            return {name: energy.to(self.device) for name, energy in energies.items()}
        with self.stages.timed("calibrate"):
            energies, facts = token_energies(
                self.model,
                self.texts.tokens,
                self.targets,
                fisher=self.config.fisher,
                seed=self.config.seed,
                settings=PassSettings.of(self.config),
                progress=self.progress,
            )
        self.passes = asdict(facts)
        self.state.keep("energies", energies, self.passes)
        return energies

    def perplexity(self, windows: Tensor | None, label: str) -> float | None:
        if windows is None:
            return None
        with self.stages.timed(f"eval_{label}"):
            return evaluate.perplexity(self.model, windows, progress=self.progress, label=f"{label} perplexity")

    def _report(self, config: PruneConfig, rows, statistics, windows, dense, pruned, energy, check) -> Report:
        parameters = list(self.model.parameters())
        perplexity = None
        if windows is not None:
            perplexity = {"dense": dense, "pruned": pruned, **protocol(windows, self.texts.bos, self.texts.tokenizer)}
        tokens_sha256 = statistics.tokens_sha256 if statistics is not None else None
        if self.texts.tokens is not None:
            tokens_sha256 = data.tokens_sha256(self.texts.tokens)
        uses_floor = config.needs_fisher and (config.facts.weighs_rows or config.allocation == "row")
        uses_floor &= self.factors is None
        return Report(
            config={
                "model": self.model.config.name_or_path,
                **self.config.to_dict(),
                "chosen": self.chosen,
                "device": str(self.device),
                "dtype": str(self.targets[0].weight.dtype).removeprefix("torch."),
            },
            matrices=[_located(row, t) for row, t in zip(rows, self.targets, strict=True)]
            + [_skipped_row(item) for item in self.skipped],
            block_parameters=sum(p.numel() for p in find_blocks(self.model)[1].parameters()),
            model_parameters=sum(p.numel() for p in parameters),
            model_zeros=sum(p.numel() - int(torch.count_nonzero(p)) for p in parameters),
            perplexity=perplexity,
            seconds=dict(self.stages.seconds),
            peak_memory_bytes=self._peak_memory(),
            energy=energy.result,
            energy_details=energy.to_dict(),
            versions=versions(self.device),
            tokens_sha256=tokens_sha256,
            bos=self.texts.bos,
            warnings=list(self.stages.notes),
            omega_floored_rows=count_floored_rows(statistics, self.targets) if uses_floor else None,
            check=check,
            passes=self.passes,
        )

    def _peak_memory(self) -> int:
        if self.device.type == "cuda":
            return self.stages.peak_bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _located(row: MatrixRow, target: Target) -> MatrixRow:
    """The row with the place of a matrix that is one slice of a tensor."""
    if target.slice_of is None:
        return row
    return replace(row, tensor=target.slice_of.parameter, index=target.slice_of.index)


def _skipped_row(item: Skipped) -> MatrixRow:
    size = sum(p.numel() for p in item.parameters)
    zeros = size - sum(int(torch.count_nonzero(p)) for p in item.parameters)
    return MatrixRow(item.name, item.shape, size, size, zeros, skipped=item.reason)


def _zero_share(tensors: list[Tensor]) -> float:
    return 1 - sum(int(torch.count_nonzero(t)) for t in tensors) / sum(t.numel() for t in tensors)
