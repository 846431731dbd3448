"""Statistics of a dense model: what Wanda and F-Wanda read from the calibration text."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

import fwanda_kernels as fk

from ..config import PruneConfig, settings_of
from ..engine.all_weights import fingerprint
from ..engine.engine import Engine
from ..engine.resume import Unfinished
from ..errors import UserError, did_you_mean, one_line, refuse_pipe, show, shown_path
from ..formats.files import atomic_file
from ..model.place import find_device
from ..model.targets import Target
from ..notes import warn
from ..setting_checks import expect_path
from .sums import SignedStatisticsSums, StatisticsSums

_NAMED = 3  # matrices that a warning names


@dataclass(eq=False)  # tensors have no truth value
class Statistics:
    """Sums over the calibration tokens, for each target.

    Attributes:
        x2: name -> [C] fp32, sum_t X_tj^2.
        g2: name -> [R] fp32, sum_t G_ti^2 of the SUMMED next-token loss, or (sum_t G_ti)^2 / n_tokens where fisher is
            "mean"; empty when no backward pass ran. omega is g2 over the tokens of the backward pass either way.
        n_tokens: name -> tokens that the module saw.
        fisher_tokens: name -> those of them that the backward pass ran on; empty when it ran on all.
        fisher_samples: the setting of how many windows that were.
        tokens_sha256: hash of the calibration windows.
        bos: whether each window starts with BOS; None if the calibration was given as token ids, or is unknown.
        fisher: the variant of g2, as in measure_statistics(); None without g2.
        text: the settings of the text: calibration, nsamples, seqlen, seed.
        weights: fingerprint() of the dense model; None if unknown.
        passes: how the windows ran, the fields of PassRecord; None if they ran block by block.
    """

    x2: dict[str, Tensor] = field(default_factory=dict)
    g2: dict[str, Tensor] = field(default_factory=dict)
    n_tokens: dict[str, int] = field(default_factory=dict)
    fisher_tokens: dict[str, int] = field(default_factory=dict)
    fisher_samples: str | None = None
    tokens_sha256: str | None = None
    bos: bool | None = None
    fisher: str | None = None
    text: dict = field(default_factory=dict)
    weights: str | None = None
    passes: dict | None = None

    @classmethod
    def of_sums(
        cls, sums: Mapping[str, Tensor], targets: Sequence[Target], fisher: str | None, device: torch.device
    ) -> Statistics:
        """The statistics of targets, from the tensors of StatisticsSums (SignedStatisticsSums for "mean").

        A target that no token reached (an expert that was never routed to) gets zeros.
        """
        statistics = cls(fisher=fisher)
        for target in targets:
            name = target.name
            if f"{name}.x2" in sums:
                count = int(sums[f"{name}.n_tokens"])
                layer = fk.LayerStatistics(sums[f"{name}.x2"], sums.get(f"{name}.g2"), count)
            else:
                layer = unseen_layer(target, device)
            if f"{name}.g1" in sums:
                layer.g2 = (sums[f"{name}.g1"].square() / layer.n_tokens).float()
            statistics.x2[name], statistics.n_tokens[name] = layer.x2, layer.n_tokens
            if fisher is not None:
                statistics.g2[name] = layer.g2
        return statistics

    def with_inputs_of(self, other: Statistics) -> Statistics:
        """These statistics, with the squared inputs of other windows added, whose gradients were not measured."""
        x2 = {name: x + other.x2[name] for name, x in self.x2.items()}
        counts = {name: count + other.n_tokens[name] for name, count in self.n_tokens.items()}
        return replace(self, x2=x2, n_tokens=counts, fisher_tokens=self.n_tokens)

    def layer(self, name: str) -> fk.LayerStatistics:
        """The sums of one target, which give its norm and omega; its tensors are those of the statistics, no copies.

        Raises:
            UserError: the statistics have no target of this name.
        """
        if not isinstance(name, str) or name not in self.x2:
            hint = did_you_mean(name, self.x2) if isinstance(name, str) else ""
            raise UserError(f"name must be that of a matrix of the statistics, got {show(name)}{hint}")
        try:
            return fk.LayerStatistics(
                self.x2[name], self.g2.get(name), self.n_tokens[name], g2_tokens=self.fisher_tokens.get(name)
            )
        except (AttributeError, LookupError, TypeError) as error:
            raise UserError(f"the statistics of {name} were altered ({one_line(error)}); measure them again") from error

    def save(self, path: str | Path) -> None:
        """Writes a .safetensors file, whole or not at all.

        Raises:
            UserError: the file cannot be written, or load() would refuse it.
        """
        from safetensors.torch import save_file

        expect_path("path", path)
        self.expect_valid(to_save=True)
        tensors, values = self.to_parts()
        # safetensors takes no two tensors of one memory
        tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        with atomic_file(Path(path)) as temporary:
            save_file(tensors, temporary, metadata={"fwanda": json.dumps(values)})

    def to_parts(self) -> tuple[dict[str, Tensor], dict]:
        """All of it as named tensors on the CPU, and JSON values."""
        tensors = {f"{name}.x2": x.cpu() for name, x in self.x2.items()}
        tensors |= {f"{name}.g2": g.cpu() for name, g in self.g2.items()}
        return tensors, {key: value for key, value in asdict(self).items() if key not in ("x2", "g2")}

    @classmethod
    def of_parts(cls, tensors: Mapping[str, Tensor], values: dict) -> Statistics:
        """The inverse of to_parts()."""
        pick = {s: {k[:-3]: t for k, t in tensors.items() if k.endswith(s)} for s in (".x2", ".g2")}
        return cls(x2=pick[".x2"], g2=pick[".g2"], **values)

    @classmethod
    def load(cls, path: str | Path) -> Statistics:
        """Reads what save() wrote.

        Raises:
            UserError: the file is missing or is not a statistics file.
        """
        from safetensors import SafetensorError, safe_open

        expect_path("statistics", path)
        refuse_pipe(path, "the statistics")
        try:
            with safe_open(path, framework="pt") as file:
                written = (file.metadata() or {}).get("fwanda")
                if written is None:
                    raise ValueError("it holds other tensors")
                values = json.loads(written)
                tensors = {key: file.get_tensor(key) for key in file.keys()}
            statistics = cls.of_parts(tensors, values)
            statistics._check_values()
            return statistics
        except FileNotFoundError as error:
            raise UserError(f"statistics {shown_path(path)}: no such file; `fwanda calibrate` writes one") from error
        except (OSError, SafetensorError, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            if os.path.isdir(path):
                raise UserError(
                    f"statistics {shown_path(path)} is a folder; give the file that `fwanda calibrate` has written"
                ) from error
            kind = "no safetensors file, " if isinstance(error, SafetensorError) else ""
            raise UserError(
                f"{shown_path(path)} is not a statistics file of `fwanda calibrate`: {kind}{one_line(error)}; measure "
                f"again with fwanda calibrate"
            ) from error

    def expect_valid(self, *, to_save: bool = False) -> None:
        """Refuses values that no run can read, as Python code may leave them.

        Args:
            to_save: also refuse statistics without the settings of their text, as load() does.

        Raises:
            UserError: naming what is wrong.
        """
        self._check_tensors()
        try:
            self._check_values(text_needed=to_save)
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"the statistics are not as collect() measures them: {one_line(error)}") from error

    def _check_tensors(self) -> None:
        """Refuses what cannot be read as the numbers of a tensor.

        Raises:
            UserError: naming the entry.
        """
        for kind, table in (("x2", self.x2), ("g2", self.g2)):
            if not isinstance(table, Mapping):
                raise UserError(f"{kind} of the statistics must be a dict of tensors, got {show(table)}")
            for name, tensor in table.items():
                if (got := _fault_of(tensor)) is not None:
                    raise UserError(f"{kind}[{show(name)}] of the statistics must be a dense tensor, got {got}")

    def _check_values(self, *, text_needed: bool = True) -> None:
        """Refuses values that no run has written.

        Args:
            text_needed: refuse an empty `text`, too.

        Raises:
            ValueError: a value has the wrong type.
        """
        counts = [*self.n_tokens.items(), *self.fisher_tokens.items()]
        counted = all(isinstance(name, str) and type(n) is int and 0 <= n < 2**63 for name, n in counts)
        if self.fisher_tokens:  # of every matrix, and never more than the forward pass saw
            counted &= self.fisher_tokens.keys() == self.n_tokens.keys()
            counted &= all(n <= self.n_tokens.get(name, 0) for name, n in self.fisher_tokens.items())
        named = all(
            isinstance(value, (str, type(None)))
            for value in (self.tokens_sha256, self.fisher, self.weights, self.fisher_samples)
        )
        known = set(settings_of("text"))
        text = isinstance(self.text, dict) and known - {"start_token"} <= set(self.text) <= known
        text |= self.text == {} and not text_needed
        passes = self.passes is None or (isinstance(self.passes, dict) and "checkpointing" in self.passes)
        if not (counted and named and text and passes and isinstance(self.bos, (bool, type(None)))):
            raise ValueError("its values have the wrong types")
        PruneConfig(**self.text, fisher=self.fisher, fisher_samples=self.fisher_samples or "all")

    def fingerprint(self) -> str:
        """sha256 of the sums.

        Raises:
            UserError: one is no dense tensor.
        """
        self._check_tensors()
        tensors, _ = self.to_parts()
        flat = torch.cat(
            [
                torch.empty(0, dtype=torch.float32),
                *(tensors[name].detach().float().flatten() for name in sorted(tensors)),
            ]
        )
        return hashlib.sha256(flat.numpy().tobytes()).hexdigest()

    def check(self, targets: Sequence[Target], *, fisher: bool, weights: str | None = None) -> None:
        """Refuses statistics that do not fit the targets, or are not finite.

        Args:
            targets: of the model to prune.
            fisher: whether g2 is needed.
            weights: fingerprint() of that model; None: not compared.

        Raises:
            UserError: naming the tensor.
        """
        other_weights = None not in (self.weights, weights) and self.weights != weights
        if set(self.x2) != {t.name for t in targets} or other_weights:
            raise UserError("the statistics are of another model; measure them on this one by fwanda calibrate")
        named: dict[str, Tensor] = {}
        for target in targets:
            rows, cols = target.shape
            for kind, table, size in (("x2", self.x2, cols), ("g2", self.g2, rows))[: 1 + fisher]:
                tensor = table.get(target.name)
                counted = isinstance(self.n_tokens.get(target.name), int)
                fault = _fault_of(tensor)
                if fault is not None or not counted or tensor.shape != (size,) or tensor.dtype != torch.float32:
                    got = f"{list(tensor.shape)} {tensor.dtype}" if fault is None else fault
                    got = got if counted else "no number of tokens"
                    raise UserError(
                        f"the statistics must hold {target.name}.{kind} [{size}], got {got}; they are of another model"
                    )
                named[f"{target.name}.{kind}"] = tensor
        valid = torch.stack([(t.isfinite() & (t >= 0)).all() for t in named.values()]).tolist()
        for name, good in zip(named, valid, strict=True):
            if not good:
                raise UserError(f"{name} has NaN or inf values; the model overflows on the calibration text")

    def to(self, device) -> Statistics:
        """The same statistics on a device.

        Raises:
            UserError: `device` is no CPU or GPU of this machine, or an entry is no dense tensor.
        """
        device = find_device(device)
        self._check_tensors()
        moved = {k: {name: t.to(device) for name, t in getattr(self, k).items()} for k in ("x2", "g2")}
        return replace(self, **moved)


def _fault_of(tensor) -> str | None:
    """Why a value cannot be read as the numbers of a tensor, in words for a message; None if it can."""
    if tensor is None:
        return "none"
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    if tensor.is_meta:
        return "a tensor on the meta device"
    if tensor.layout != torch.strided or tensor.is_nested:
        return "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
    return None


def unseen_layer(target: Target, device: torch.device) -> fk.LayerStatistics:
    """Statistics of a module that met no calibration token."""
    rows, cols = (torch.zeros(size, dtype=torch.float32, device=device) for size in target.shape)
    return fk.LayerStatistics(cols, rows, n_tokens=0)


def warn_unseen(names: Sequence[str]) -> None:
    """Warns that matrices met no calibration token, so that nothing is known about their inputs; none: no warning."""
    if names:
        matrices, its = _named(names)
        warn(f"{matrices} saw no calibration token: {its} weights are ranked by magnitude")


def warn_without_gradient(names: Sequence[str]) -> None:
    """Warns that the gradient at the outputs of matrices is 0, so that F-Wanda knows nothing about them."""
    if names:
        matrices, its = _named(names)
        warn(
            f"the gradient at the outputs of {matrices} is 0, for example because they only select tokens: each of "
            f"{its} rows keeps the same share"
        )


def _named(names: Sequence[str]) -> tuple[str, str]:
    """One name, or the number of names and the first ones; and `its` or `their`."""
    if len(names) == 1:
        return names[0], "its"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{len(names)} matrices ({', '.join(names[:_NAMED])}{more})", "their"


def check_uses_statistics(config: PruneConfig) -> None:
    """Refuses statistics for settings that read none of them.

    Args:
        config: resolved.

    Raises:
        UserError: saying why.
    """
    if config.reads_statistics:
        return
    method = f"--method {config.method}"
    if config.traits.reads_inputs:
        raise UserError(
            f"{method} with --order {config.order} measures the inputs of each pruned block, so it uses no statistics; "
            f"leave out the statistics or --order"
        )
    reason = "reads no text"
    if config.traits.updates_weights:
        pattern = f" with --pattern {config.pattern}" if config.weighs_tokens else ""
        reason = f"{pattern} measures its own sums block by block".lstrip()
    raise UserError(f"{method} {reason}, so it uses no statistics; leave them out")


def measure_statistics(
    engine: Engine,
    tokens: Tensor,
    *,
    fisher: str | None = "empirical",
    fisher_windows: Tensor | None = None,
    seed: int = 0,
    unfinished: Callable[[str], Unfinished] | None = None,
) -> Statistics:
    """Measures the targets in one forward pass over the text and, with `fisher`, one activation-only backward pass.

    Args:
        engine: of a dense model in eval mode.
        tokens: [S, L] int64 windows without padding.
        fisher: None for the forward pass alone, or the variant of the Fisher information:
            "empirical": omega_i = mean_t G_ti^2, the labels are the text.
            "true": the same with each label drawn from the model's own prediction (softmax at temperature 1).
            "mean": omega_i = (mean_t G_ti)^2, the labels are the text.
        fisher_windows: [F] int64 positions of the windows of the backward pass, ascending; None: all.
        seed: of the labels that "true" draws; the global random states are left alone.
        unfinished: gives a place where the sums of a part of the passes are saved, for an interrupted run.

    Returns:
        Statistics on the engine's device.

    Raises:
        UserError: the memory does not suffice, the blocks cannot be compiled though they should be, or a sum is not
            finite.

    The loss is the SUM of the next-token losses, so that omega does not depend on the window length. All parameters are
    frozen: the backward pass forms gradients of activations only. Source: the F-Wanda paper, algorithm 1; for "true"
    and "mean" its ablation "Which Fisher matters".
    """
    if fisher is None or fisher_windows is None or len(fisher_windows) == len(tokens):
        label = "calibrate (forward only)" if fisher is None else "calibrate (forward and backward)"
        statistics = _measure(engine, tokens, fisher, seed, unfinished, label)
    else:
        others = torch.ones(len(tokens), dtype=torch.bool, device="cpu")
        others[fisher_windows] = False
        # the backward pass comes last: the peak of the memory is that of the last windows, and it needs the most
        label = "calibrate, part 1 of 2 (forward only)"
        inputs = _measure(engine, tokens[others], None, seed, unfinished, label)
        label = "calibrate, part 2 of 2 (forward and backward)"
        statistics = _measure(engine, tokens[fisher_windows], fisher, seed, unfinished, label).with_inputs_of(inputs)
    warn_unseen([target.name for target in engine.targets if not statistics.n_tokens[target.name]])
    if fisher is not None:
        reached = [name for name, count in statistics.n_tokens.items() if statistics.fisher_tokens.get(name, count)]
        warn_without_gradient([name for name in reached if not statistics.g2[name].any()])
    statistics.weights = fingerprint(engine)
    statistics.check(engine.targets, fisher=fisher is not None)
    return statistics


def _measure(
    engine: Engine,
    tokens: Tensor,
    fisher: str | None,
    seed: int,
    unfinished: Callable[[str], Unfinished] | None,
    label: str,
) -> Statistics:
    """One forward pass over windows [S, L], and the backward pass of each with `fisher`."""
    modules = {target.name: target.module for target in engine.targets}
    sums = SignedStatisticsSums(modules) if fisher == "mean" else StatisticsSums(modules)
    name = "forward" if fisher is None else "backward"
    passes = engine.measure(
        tokens,
        sums,
        backward=fisher is not None,
        label_seed=seed if fisher == "true" else None,
        label=label,
        unfinished=None if unfinished is None else unfinished(name),
    )
    statistics = Statistics.of_sums(sums.tensors(), engine.targets, fisher, engine.device)
    statistics.passes = asdict(passes)
    return statistics
