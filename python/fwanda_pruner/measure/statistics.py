"""Text through the model: statistics of every target from one forward and one activation-only backward pass."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import fwanda_kernels as fk

from ..config import TEXT_NUMBERS
from ..engine.device import model_device
from ..engine.loop import Passes, PassFacts, PassSettings, Progress, uncompiled
from ..errors import UserError, one_line
from ..formats.dense import atomic_file
from ..model.targets import Target
from ..run.state import RunState

_PROGRESS = "calibration"  # the stage of a run's state


@dataclass
class Statistics:
    """Sums over the calibration tokens, for each target.

    Attributes:
        x2: name -> [C] fp32, sum_t X_tj^2.
        g2: name -> [R] fp32, sum_t G_ti^2 of the SUMMED next-token loss, or (sum_t G_ti)^2 / n_tokens where fisher is
            "mean"; empty when no backward pass ran. omega is g2 / n_tokens either way.
        n_tokens: name -> tokens the module saw.
        tokens_sha256: of the calibration windows.
        bos: whether each window starts with BOS.
        fisher: the variant of g2, as in calibrate(); None without g2.
        text: the settings of the text: calibration, nsamples, seqlen, seed.
        weights: fingerprint() of the dense model; None if unknown.
        passes: how the passes ran, the fields of PassFacts; None if they ran block by block.
    """

    x2: dict[str, Tensor] = field(default_factory=dict)
    g2: dict[str, Tensor] = field(default_factory=dict)
    n_tokens: dict[str, int] = field(default_factory=dict)
    tokens_sha256: str | None = None
    bos: bool | None = None
    fisher: str | None = None
    text: dict = field(default_factory=dict)
    weights: str | None = None
    passes: dict | None = None

    def layer(self, name: str) -> fk.LayerStatistics:
        """The sums of one target, which give its norm and omega."""
        return fk.LayerStatistics(self.x2[name], self.g2.get(name), self.n_tokens[name])

    def add(self, target: Target, collected: fk.collect_statistics) -> None:
        """Take the sums of one target; zeros if it saw no token (an expert that was never routed to)."""
        layer = collected[target.name] if target.name in collected else unseen_layer(target)
        self.x2[target.name] = layer.x2
        self.n_tokens[target.name] = layer.n_tokens
        if self.fisher is not None:
            self.g2[target.name] = layer.g2

    def save(self, path: str | Path) -> None:
        """Write a .safetensors file, whole or not at all.

        Raises:
            UserError: the file cannot be written.
        """
        from safetensors.torch import save_file

        tensors, facts = self.parts()
        with atomic_file(Path(path)) as temporary:
            save_file(tensors, temporary, metadata={"fwanda": json.dumps(facts)})

    def parts(self) -> tuple[dict[str, Tensor], dict]:
        """All of it as named tensors on the CPU and JSON values."""
        tensors = {f"{name}.x2": x.cpu() for name, x in self.x2.items()}
        tensors |= {f"{name}.g2": g.cpu() for name, g in self.g2.items()}
        return tensors, {k: v for k, v in asdict(self).items() if k not in ("x2", "g2")}

    @classmethod
    def of_parts(cls, tensors: dict[str, Tensor], facts: dict) -> Statistics:
        """The inverse of parts()."""
        pick = {s: {k[:-3]: t for k, t in tensors.items() if k.endswith(s)} for s in (".x2", ".g2")}
        return cls(x2=pick[".x2"], g2=pick[".g2"], **facts)

    @classmethod
    def load(cls, path: str | Path) -> Statistics:
        """Read what save() wrote.

        Raises:
            UserError: the file is missing or is not a statistics file.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {})["fwanda"])
                tensors = {key: file.get_tensor(key) for key in file.keys()}
            statistics = cls.of_parts(tensors, facts)
            statistics._check_facts()
            return statistics
        except (OSError, SafetensorError, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{path} is not a statistics file of `fwanda calibrate`: {one_line(error)}") from error

    def _check_facts(self) -> None:
        """Refuse what no run has written.

        Raises:
            ValueError: a fact is of the wrong type.
        """
        counts = self.n_tokens.items()
        counted = all(isinstance(name, str) and type(n) is int and 0 <= n < 2**63 for name, n in counts)
        named = all(isinstance(fact, (str, type(None))) for fact in (self.tokens_sha256, self.fisher, self.weights))
        text = isinstance(self.text, dict) and set(self.text) <= {"calibration", *TEXT_NUMBERS}
        if not (counted and named and text and self.bos in (None, True, False)):
            raise ValueError("its facts have the wrong types")

    def fingerprint(self) -> str:
        """sha256 of the sums."""
        tensors, _ = self.parts()
        return _sha256([tensors[name] for name in sorted(tensors)])

    def check(self, targets: list[Target], *, fisher: bool) -> None:
        """Refuse statistics that do not fit the targets, or are not finite.

        Raises:
            UserError: naming the tensor.
        """
        other_weights = self.weights is not None and self.weights != fingerprint(targets)
        if set(self.x2) != {t.name for t in targets} or other_weights:
            raise UserError("the statistics are of another model; measure them on this one by fwanda calibrate")
        named: dict[str, Tensor] = {}
        for target in targets:
            rows, cols = target.weight.shape
            for kind, table, size in (("x2", self.x2, cols), ("g2", self.g2, rows))[: 1 + fisher]:
                tensor = table.get(target.name)
                counted = isinstance(self.n_tokens.get(target.name), int)
                if tensor is None or not counted or tensor.shape != (size,) or tensor.dtype != torch.float32:
                    got = "none" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
                    raise UserError(
                        f"the statistics must hold {target.name}.{kind} [{size}], got {got}; they are of another model"
                    )
                named[f"{target.name}.{kind}"] = tensor
        valid = torch.stack([(t.isfinite() & (t >= 0)).all() for t in named.values()]).tolist()
        for name, good in zip(named, valid, strict=True):
            if not good:
                raise UserError(f"{name} has NaN or inf values; the model overflows on the calibration text")

    def to(self, device) -> Statistics:
        """The same statistics on a device."""
        moved = {k: {name: t.to(device) for name, t in getattr(self, k).items()} for k in ("x2", "g2")}
        return replace(self, **moved)


def fingerprint(targets: list[Target]) -> str:
    """sha256 of a sample of each dense weight, in fp32: tells models of one shape apart."""
    samples = []
    for weight in (t.weight for t in targets):
        rows, cols = weight.shape
        samples.append(weight[:: max(1, rows // 8), :: max(1, cols // 8)])
    return _sha256(samples)


def _sha256(tensors: list[Tensor]) -> str:
    return hashlib.sha256(torch.cat([t.float().flatten() for t in tensors]).cpu().numpy().tobytes()).hexdigest()


def warn_unseen(target: Target) -> None:
    """Say that a module met no calibration token, so that its inputs tell nothing."""
    warnings.warn(f"{target.name} saw no calibration token: its weights are ranked by magnitude", stacklevel=3)


def unseen_layer(target: Target) -> fk.LayerStatistics:
    """Statistics of a module that met no calibration token, with the warning."""
    warn_unseen(target)
    rows, cols = (torch.zeros(size, device=target.weight.device) for size in target.weight.shape)
    return fk.LayerStatistics(cols, rows, n_tokens=0)


def calibrate(
    model: nn.Module,
    tokens: Tensor,
    targets: list[Target],
    *,
    fisher: str | None = "empirical",
    seed: int = 0,
    settings: PassSettings | None = None,
    state: RunState | None = None,
    progress: bool = True,
) -> Statistics:
    """Statistics of the targets from one forward and, with fisher, one activation-only backward pass over the text.

    Args:
        model: a causal language model in eval mode; its parameters and flags are as before afterwards.
        tokens: [S, L] int64 windows without padding.
        targets: from find_targets().
        fisher: None for the forward pass alone, or the variant of the Fisher information:
            "empirical": omega_i = mean_t G_ti^2, the labels are the text.
            "true": the same with each label drawn from the model's own prediction (softmax at temperature 1).
            "mean": omega_i = (mean_t G_ti)^2, the labels are the text.
        seed: of the labels that "true" draws; the global random states are left alone.
        settings: how the passes run.
        state: keeps the sums about every minute, to go on with after an interruption; not those of "mean".
        progress: show a bar.

    Returns:
        Statistics on the model's device.

    Raises:
        UserError: the memory does not suffice, or the blocks cannot be compiled though they should be.

    The loss is the SUM of the next-token losses, so that omega does not depend on the window length. All parameters are
    frozen: the backward pass forms gradients of activations only. Source: the paper, algorithm 1; of "true" and "mean"
    its ablation "Which Fisher matters".
    """
    modules = {t.name: t.module for t in targets}
    settings, signed = settings or PassSettings(), SignedSums(modules)
    if fisher == "mean":
        settings = uncompiled(settings, "--fisher mean is measured")
    passes = fisher_passes(
        model,
        tokens,
        modules,
        fisher=fisher,
        seed=seed,
        settings=settings,
        beside=signed if fisher == "mean" else nullcontext(),
        progress=progress,
    )
    if state is not None and fisher != "mean":
        passes.progress = _recalled_progress(state, model_device(model))
        passes.keep = partial(_keep_progress, state)
    with torch.inference_mode(False), torch.enable_grad(), frozen(model, fisher is not None):
        collected, facts = passes.run()
    statistics = Statistics(fisher=fisher, weights=fingerprint(targets), passes=asdict(facts))
    for target in targets:
        statistics.add(target, collected)
        if target.name in signed.g1:
            statistics.g2[target.name] = (signed.g1[target.name].square() / statistics.n_tokens[target.name]).float()
    return statistics


def fisher_passes(
    model: nn.Module,
    tokens: Tensor,
    modules: Mapping[str, nn.Module],
    *,
    fisher: str | None,
    seed: int,
    settings: PassSettings,
    beside: AbstractContextManager,
    progress: bool,
) -> Passes:
    """The passes of calibrate(), not run yet, with other hooks beside those of the modules."""
    label = "calibrate" if fisher is None else "calibrate (forward and backward)"
    return Passes(
        model=model,
        modules=modules,
        tokens=tokens,
        backward=fisher is not None,
        settings=settings,
        label=label if progress else None,
        label_seed=seed if fisher == "true" else None,
        beside=beside,
    )


def _keep_progress(state: RunState, progress: Progress) -> None:
    tensors = {f"{name}.{key}": getattr(layer, key) for name, layer in progress.sums.items() for key in ("x2", "g2")}
    if progress.generator is not None:
        tensors["generator"] = progress.generator
    counts = {name: layer.n_tokens for name, layer in progress.sums.items()}
    state.keep(_PROGRESS, tensors, {"done": progress.done, "passes": asdict(progress.facts), "n_tokens": counts})


def _recalled_progress(state: RunState, device: torch.device) -> Progress | None:
    if (kept := state.recall(_PROGRESS)) is None:
        return None
    tensors, facts = kept
    sums = {
        name: fk.LayerStatistics(tensors[f"{name}.x2"].to(device), tensors[f"{name}.g2"].to(device), count)
        for name, count in facts["n_tokens"].items()
    }
    return Progress(facts["done"], PassFacts(**facts["passes"]), sums, tensors.get("generator"))


class OutputGradients:
    """Context manager that hands each gradient at the outputs of modules, which are not compiled, to add(), with the
    number of the call. Gradients come in another order than calls, and calls that checkpointing repeats have none.

    Args:
        modules: name -> module with one output [..., R].
    """

    def __init__(self, modules: Mapping[str, nn.Module]):
        self._modules = modules
        self._handles: list = []
        self._calls: dict[str, int] = {}
        self.clear()

    def __enter__(self) -> OutputGradients:
        self._calls = dict.fromkeys(self._modules, 0)
        self.clear()
        self._handles = [m.register_forward_hook(partial(self._hook, name)) for name, m in self._modules.items()]
        return self

    def __exit__(self, *_) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str, _module: nn.Module, _args: tuple, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(self.add, name, self._calls[name]))
        self._calls[name] += 1

    def clear(self) -> None:
        """Begin from nothing; called whenever the block is entered."""
        raise NotImplementedError

    def add(self, name: str, call: int, gradient: Tensor) -> None:
        """Take the gradient of one call of a module."""
        raise NotImplementedError


class SignedSums(OutputGradients):
    """Adds up the gradients.

    Attributes:
        g1: name -> [R] fp64, sum_t G_ti; without an entry where no gradient came.
    """

    def clear(self) -> None:
        self.g1: dict[str, Tensor] = {}

    def add(self, name: str, call: int, gradient: Tensor) -> None:
        total = gradient.flatten(0, -2).sum(0, dtype=torch.float64)
        self.g1[name] = self.g1[name] + total if name in self.g1 else total


@contextmanager
def frozen(model: nn.Module, backward: bool) -> Iterator[None]:
    """No parameter wants a gradient; with backward, the embedding output does, so that a graph exists.

    Raises:
        UserError: a backward pass is wanted of a model that was made under inference mode.
    """
    if backward and any(p.is_inference() for p in model.parameters()):
        raise UserError("the model was made under torch.inference_mode(), which allows no backward pass")
    wanted = [p for p in model.parameters() if p.requires_grad]
    for p in wanted:
        p.requires_grad_(False)
    embedding = model.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda _m, _i, out: out.requires_grad_(True)) if backward else None
    try:
        yield
    finally:
        if handle:
            handle.remove()
        for p in wanted:
            p.requires_grad_(True)
