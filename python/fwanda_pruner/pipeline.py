"""prune(): the stages in order, and the facts they leave in the report."""

from __future__ import annotations

import resource
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from . import data, evaluate
from .budgets import count_floored_rows
from .calibrate import Statistics, calibrate
from .config import PruneConfig
from .energy import EnergyMeter
from .errors import UserError
from .methods import Job, prune_targets
from .model import Skipped, Target, check_targets, find_targets
from .report import MatrixRow, Report, versions

_OBS_METHODS = ("sparsegpt", "fsparsegpt")


@dataclass
class Stages:
    """Seconds of each stage and the warnings met on the way."""

    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage, the device's queued work included."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.perf_counter() - start, 3)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keep this package's warnings for the report; they are shown all the same."""
        package = str(Path(__file__).parent)
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            show = warnings.showwarning

            def keep(message, category, filename, lineno, file=None, line=None):
                ours = issubclass(category, UserWarning) and filename.startswith(package)
                if ours and str(message) in self.notes:
                    return
                if ours:
                    self.notes.append(str(message))
                show(message, category, filename, lineno, file, line)

            warnings.showwarning = keep
            yield


def prune(
    model: nn.Module,
    tokenizer=None,
    *,
    config: PruneConfig | None = None,
    statistics: Statistics | None = None,
    calibration: str | Tensor | None = None,
    eval: str | Tensor | None = None,
    progress: bool = True,
    **settings,
) -> Report:
    """Prune a causal language model in place.

    Args:
        model: a Hugging Face causal language model with floating-point weights, on the device to work on.
        tokenizer: its tokenizer; not needed when all text is given as token ids.
        config: the settings; or give them by name in **settings.
        statistics: of this dense model, from calibrate(); the forward and backward pass is then left out.
        calibration: overrides config.calibration; may be token ids [S, L] int64, used as they are.
        eval: overrides config.eval; may be token ids [S, L] int64.
        progress: show bars.
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
    with stages.noting(), _evaluation_mode(model):
        return _Run(config, model, tokenizer, calibration, eval, statistics, stages, progress).prune()


def plan(model: nn.Module, config: PruneConfig) -> tuple[list[Target], list[Skipped]]:
    """The targets of a model and what is left alone, after all checks that need no text.

    Raises:
        UserError: as prune().
    """
    targets, skipped = find_targets(model)
    check_targets(targets, config.resolved())
    return targets, skipped


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


class _Run:
    """One call of prune() or collect()."""

    def __init__(self, config: PruneConfig, model, tokenizer, calibration, eval, statistics, stages, progress: bool):
        if statistics is not None and config.order is None:
            config = replace(config, order="onepass")
        self.config = config.resolved()
        self.model, self.tokenizer, self.given = model, tokenizer, statistics
        self.stages, self.progress = stages, progress
        self.calibration = self.config.calibration if calibration is None else calibration
        self.eval = self.config.eval if eval is None else eval
        self.device = next(model.parameters()).device
        self.bos: bool | None = None
        self.tokens: Tensor | None = None
        self.targets, self.skipped = find_targets(model)
        check_targets(self.targets, self.config)

    def prune(self) -> Report:
        config = self.config
        if config.nm and (config.allocation in ("row", "global") or config.method == "fsparsegpt"):
            plain = "wanda" if config.method == "fwanda" else "sparsegpt"
            warnings.warn(
                f"{config.method} under {config.pattern} is exactly {plain}'s {config.pattern}: a factor for each row "
                f"cancels inside a group",
                stacklevel=2,
            )
        self._check_given()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        windows = self._read_text()
        dense = self._perplexity(windows, "dense")
        if dense is not None:
            note = evaluate.check_dense(dense, self.model.config.get_text_config().vocab_size)
            if note:
                warnings.warn(note, stacklevel=2)
        with EnergyMeter(self.device) as energy:
            statistics = self._statistics()
            with self.stages.timed("prune"):
                rows = prune_targets(Job(config, self.model, self.targets, self.tokens, statistics, self.progress))
        pruned = self._perplexity(windows, "pruned")
        return self._report(rows, statistics, windows, dense, pruned, energy.result)

    def collect(self) -> Statistics:
        self._read_text()
        with self.stages.timed("calibrate"):
            return self._calibrated(self.config.fisher)

    def _check_given(self) -> None:
        method, order = self.config.method, self.config.order
        if self.given is None:
            return
        if method in ("magnitude", "sparsegpt"):
            raise UserError(f"--method {method} uses no statistics; leave --statistics out")
        if order != "onepass":
            raise UserError(f"--statistics are of the dense model and need --order onepass, got {order}")
        self.given.check(self.targets, fisher=self._needs_fisher)

    @property
    def _needs_fisher(self) -> bool:
        config = self.config
        if config.nm:
            return False
        return config.method == "fsparsegpt" or (config.method == "fwanda" and config.allocation != "uniform")

    def _read_text(self) -> Tensor | None:
        """Tokenise calibration (kept) and evaluation text (returned), with the BOS policy decided on the way."""
        config = self.config
        with self.stages.timed("text"):
            self.bos = self.given.bos if self.given is not None else {"none": False, "window": True}.get(config.bos)
            if config.method in _OBS_METHODS or (config.method != "magnitude" and self.given is None):
                self.tokens = self._with_bos(
                    lambda bos: data.calibration_tokens(
                        self.calibration,
                        self.tokenizer,
                        nsamples=config.nsamples,
                        seqlen=self._seqlen(self.calibration),
                        seed=config.seed,
                        bos=bos,
                    )
                )
            if self.eval is None:
                return None
            return self._with_bos(
                lambda bos: data.evaluation_tokens(
                    self.eval,
                    self.tokenizer,
                    seqlen=self._seqlen(self.eval, eval=True),
                    bos=bos,
                    windows=config.eval_windows,
                )
            )

    def _seqlen(self, source, eval: bool = False) -> int:
        if isinstance(source, Tensor) and source.dim() == 2:
            return source.shape[1]
        return self.config.eval_seqlen if eval else self.config.seqlen

    def _with_bos(self, read) -> Tensor:
        if self.bos is None:
            tokens = read(False)
            self.bos = self.tokenizer is not None and evaluate.choose_bos(self.model, self.tokenizer, tokens[0])
            return read(True) if self.bos else tokens
        return read(self.bos)

    def _statistics(self) -> Statistics | None:
        """The given statistics, or those that the method needs, or None."""
        if self.given is not None:
            return self.given.to(self.device)
        config, fisher = self.config, self._needs_fisher
        needs_x2 = config.method in ("wanda", "fwanda") and config.order == "onepass"
        if not fisher and not needs_x2:
            return None
        with self.stages.timed("calibrate"):
            return self._calibrated(config.fisher if fisher else None)

    def _calibrated(self, fisher: str | None) -> Statistics:
        statistics = calibrate(self.model, self.tokens, self.targets, fisher=fisher, progress=self.progress)
        statistics.check(self.targets, fisher=fisher is not None)
        statistics.tokens_sha256, statistics.bos = data.tokens_sha256(self.tokens), self.bos
        return statistics

    def _perplexity(self, windows: Tensor | None, label: str) -> float | None:
        if windows is None:
            return None
        with self.stages.timed(f"eval_{label}"):
            return evaluate.perplexity(self.model, windows, progress=self.progress, label=f"{label} perplexity")

    def _report(self, rows, statistics, windows, dense, pruned, energy) -> Report:
        parameters = list(self.model.parameters())
        perplexity = None
        if windows is not None:
            perplexity = {"dense": dense, "pruned": pruned, **protocol(windows, self.bos, self.tokenizer)}
        skipped = [MatrixRow(s.name, s.shape, asked=0, kept=0, kept_zero=0, skipped=s.reason) for s in self.skipped]
        tokens_sha256 = statistics.tokens_sha256 if statistics is not None else None
        if tokens_sha256 is None and self.tokens is not None:
            tokens_sha256 = data.tokens_sha256(self.tokens)
        uses_floor = self._needs_fisher and (self.config.method == "fsparsegpt" or self.config.allocation == "row")
        return Report(
            config={"model": self.model.config.name_or_path, **self.config.to_dict()},
            matrices=rows + skipped,
            model_parameters=sum(p.numel() for p in parameters),
            model_zeros=sum(p.numel() - int(torch.count_nonzero(p)) for p in parameters),
            perplexity=perplexity,
            seconds=dict(self.stages.seconds),
            peak_memory_bytes=self._peak_memory(),
            energy=energy,
            versions=versions(self.device),
            tokens_sha256=tokens_sha256,
            bos=self.bos,
            warnings=list(self.stages.notes),
            omega_floored_rows=count_floored_rows(statistics, self.targets) if uses_floor else None,
        )

    def _peak_memory(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def protocol(windows: Tensor, bos: bool | None, tokenizer) -> dict:
    """What makes two perplexities comparable: the windows [S, L], the BOS policy and the tokenizer."""
    return {
        "seqlen": windows.shape[1],
        "windows": windows.shape[0],
        "tokens_sha256": data.tokens_sha256(windows),
        "bos": bos,
        "tokenizer": None if tokenizer is None else type(tokenizer).__name__,
    }


def collect(
    model: nn.Module, tokenizer=None, *, config: PruneConfig, calibration=None, progress: bool = True
) -> Statistics:
    """Statistics for any sparsity, pattern and allocation of wanda and fwanda, from one forward and backward pass.

    Args:
        model, tokenizer, config, calibration, progress: as prune(); of the config only the text settings count.

    Raises:
        UserError: as prune().
    """
    stages = Stages()
    with stages.noting(), _evaluation_mode(model):
        return _Run(config, model, tokenizer, calibration, None, None, stages, progress).collect()


def evaluate_model(model: nn.Module, tokenizer, *, config: PruneConfig, progress: bool = True) -> dict:
    """Perplexity of a model as it is, with its protocol, and the zeros it holds.

    Args:
        model, tokenizer: a causal language model and its tokenizer.
        config: eval, eval_seqlen (default: seqlen), eval_windows and bos count.
        progress: show a bar.

    Returns:
        {"perplexity": float, seqlen, windows, tokens_sha256, bos, tokenizer,
        "sparsity": {"matrices": over the prunable matrices, "model": over all parameters}}.

    Raises:
        UserError: as prune().
    """
    stages = Stages()
    config = replace(config, method="magnitude", allocation=None, order=None)
    with stages.noting(), _evaluation_mode(model):
        run = _Run(config, model, tokenizer, None, None, None, stages, progress)
        windows = run._read_text()
        value = run._perplexity(windows, "model")
    weights = [t.weight for t in run.targets]
    return {
        "perplexity": value,
        **protocol(windows, run.bos, tokenizer),
        "sparsity": {"matrices": _zero_share(weights), "model": _zero_share(list(model.parameters()))},
    }


def _zero_share(tensors: list[Tensor]) -> float:
    return 1 - sum(int(torch.count_nonzero(t)) for t in tensors) / sum(t.numel() for t in tensors)
