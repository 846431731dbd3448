"""llm-compressor as a host: F-Wanda as a modifier, and our kernels inside the host's own Wanda and SparseGPT.

Importing this module registers `FWandaModifier` as a key of YAML recipes. In the host, `mask_structure` "n:m" means
PRUNE n of m; this module converts it to the number kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor, nn

import fwanda_kernels as fk

from ..allocate.budgets import keep_budgets
from ..config import PruneConfig
from ..engine.all_weights import check_finite
from ..engine.device import evaluating
from ..engine.engine import Engine, make_engine
from ..errors import UserError, install_hint
from ..measure.statistics import Statistics, unseen_layer, warn_unseen
from ..measure.sums import StatisticsSums
from ..methods.damping import damped_factor
from ..model.targets import Target, check_model
from . import check_linear, check_version, kept_of
from ._budgets import refuse_bad

try:
    import llmcompressor
    from compressed_tensors.offload import disable_offloading, update_offload_parameter
    from compressed_tensors.utils import is_match, match_named_modules, patch_attr
    from llmcompressor.modifiers.factory import ModifierFactory
    from llmcompressor.modifiers.pruning.sparsegpt import base as sparsegpt
    from llmcompressor.modifiers.pruning.sparsegpt.sgpt_base import PRUNABLE_LAYER_TYPES, SparsityModifierBase
    from llmcompressor.modifiers.pruning.wanda import base as wanda
    from pydantic import Field, PrivateAttr, model_validator
except ImportError as error:
    raise ImportError(
        f"llm-compressor with its sparsity modifiers is missing ({error}); {install_hint('llmcompressor>=0.14,<0.15')}"
    ) from error

__all__ = ["FWandaModifier", "use_fwanda_kernels"]

_CALIBRATED = ("frozen", "compressed", "decompressed")  # statuses of a quantised layer whose weight no longer changes
_TEXT_KEYS = {"input_ids", "attention_mask", "labels", "loss_mask", "token_type_ids", "position_ids"}

check_version("llmcompressor", llmcompressor.__version__, "0.14", "0.14")
if not hasattr(SparsityModifierBase, "on_calibration_start"):  # the host would never call the modifier
    raise ImportError(
        f"llmcompressor {llmcompressor.__version__} has another life cycle of modifiers, expected that of 0.14; "
        f"{install_hint('llmcompressor>=0.14,<0.15')}"
    )


class FWandaModifier(SparsityModifierBase):
    """F-Wanda in an llm-compressor recipe: Wanda's score, with a budget of kept weights for each row.

    When the pipeline starts, the modifier runs one forward and one backward pass of the dense model over the
    calibration samples. These measure the Fisher information, which fixes the budgets; the whole model must fit on the
    device. The pipeline's own passes then measure the input norms that rank the weights of a row. In the `sequential`
    pipeline the inputs come from the pruned layers below, as in the host's Wanda.

    Args:
        sparsity: fraction removed, read as an exact decimal. The default is 0.5, or what mask_structure implies.
        allocation: "row" (budgets inside each matrix by omega^power, as in the paper), "global" (over all targets) or
            "uniform".
        power: exponent p of "row".
        row_exponent, layer_exponent: damping exponents of "global".
        mask_structure: "n:m" as in the host, PRUNE n of every m; "0:0" is unstructured. Row budgets cancel inside a
            group, so with a pattern this is the host's Wanda, and a warning says so.
        targets, ignore: as in the host; the output head is ignored by default.

    Raises:
        UserError: in calibration, if a target is quantised, parametrised, shared or not linear, if the samples are
            padded or not text, or if a value is not finite. The message names it.
        pydantic.ValidationError: a setting is not allowed.
    """

    sparsity: float | str | None = None
    allocation: str = "row"
    power: float = 0.5
    row_exponent: float = 0.75
    layer_exponent: float = 0.5
    ignore: list[str] = Field(default_factory=lambda: ["re:.*lm_head"])

    _config: PruneConfig = PrivateAttr()
    _pending: dict[nn.Module, Target] = PrivateAttr(default_factory=dict)
    _budgets: dict[str, Tensor] | None = PrivateAttr(default=None)
    _inputs: dict[str, fk.LayerStatistics] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _read_settings(self) -> FWandaModifier:
        if self.sparsity_profile is not None:
            raise UserError(
                f"FWandaModifier has its own allocation, got sparsity_profile {self.sparsity_profile!r}; remove it"
            )
        settings = {k: getattr(self, k) for k in ("allocation", "sparsity", "power", "row_exponent", "layer_exponent")}
        prune_n, m = self._prune_n, self._prune_m
        pattern = f"{kept_of(prune_n, m)}:{m}" if prune_n else None
        self._config = PruneConfig(method="fwanda", pattern=pattern, **settings).resolved()
        if self._config.responds:
            raise UserError(
                f"allocation must be row, global or uniform, got {self.allocation}, which measures the pruned model; "
                f"use fwanda_pruner.prune() for it"
            )
        if pattern:
            warnings.warn(
                f"with mask_structure {self.mask_structure} the result is exactly Wanda's: row budgets cancel inside a "
                f"group",
                stacklevel=2,
            )
        return self

    def on_initialize(self, state, **kwargs) -> bool:
        """Set up as the host does, after the checks that need no text."""
        if state.data.calib is None:
            raise UserError("FWandaModifier needs calibration samples: pass dataset= to oneshot()")
        done = super().on_initialize(state, **kwargs)
        self._find_targets()
        return done

    def on_calibration_start(self, state, event, **kwargs) -> None:
        """Fix the budgets on the dense model, then hook the targets, whose inputs the pipeline's passes measure."""
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise UserError("FWandaModifier runs in one process only, since each rank would prune by its own samples")
        with disable_offloading():
            targets = self._find_targets()
            check_model(state.model, targets, self._config)
            check_finite(make_engine(state.model, targets, self._config))
            self._budgets = self._measure_budgets(state.model, targets, state.data.calib)
        self._pending = {t.module: t for t in targets}
        self._inputs = {}
        for target in targets:
            self.register_hook(target.module, self.calibrate_module, "forward")

    def calibrate_module(self, module: nn.Module, args: tuple[Tensor, ...], _output: Tensor) -> None:
        """Forward hook: add the sums of squares of the input's columns."""
        x, name = args[0].detach(), self._pending[module].name
        if name not in self._inputs:
            self._inputs[name] = fk.LayerStatistics(
                torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device), None, n_tokens=0
            )
        fk.accumulate_sq_sums_(self._inputs[name].x2, x)
        self._inputs[name].n_tokens += x.shape[:-1].numel()

    def compress_modules(self) -> None:
        """Prune the modules that have seen input. The host calls this when their inputs are complete."""
        self._prune([t for t in self._pending.values() if t.name in self._inputs])

    def on_calibration_end(self, state, event, **kwargs) -> None:
        """Remove the hooks, and prune modules that saw no token by magnitude."""
        super().on_calibration_end(state, event, **kwargs)
        unseen = list(self._pending.values())
        warn_unseen([target.name for target in unseen])
        for target in unseen:
            with disable_offloading():
                self._inputs[target.name] = unseen_layer(target, target.weight.device)
        self._prune(unseen)
        self._budgets = None

    def _find_targets(self) -> list[Target]:
        """The linear layers that `targets` matches and `ignore` does not; refuses one that cannot be pruned."""
        names: dict[nn.Module, str] = {}
        for prefix, layer in self._target_layers.items():
            for suffix, module in match_named_modules(layer, PRUNABLE_LAYER_TYPES):
                name = f"{prefix}.{suffix}".strip(".")
                if not is_match(name, module, self.ignore):
                    names.setdefault(module, name)
        if not names:
            raise UserError(f"no linear layer matches targets {self.targets} outside ignore {self.ignore}")
        for module, name in names.items():
            _check_weight(name, module)
        return [Target(name, 0, module) for module, name in names.items()]

    def _measure_budgets(self, model: nn.Module, targets: list[Target], samples: Iterable) -> dict[str, Tensor] | None:
        config = self._config
        _refuse_shared(model, targets)
        if not config.needs_budgets:
            return None
        engine = make_engine(model, targets, PruneConfig(compile="off"))
        statistics = None
        if config.needs_fisher:
            with evaluating(model):
                statistics = _measure(engine, _windows(samples))
            statistics.check(targets, fisher=True)
        return keep_budgets(config, engine, statistics)

    @torch.no_grad()
    def _prune(self, targets: list[Target]) -> None:
        if not targets:
            return
        with disable_offloading():
            weights = [t.weight for t in targets]
            norms = [self._inputs[t.name].norm for t in targets]
            flags = torch.zeros(len(targets), dtype=torch.int32, device=weights[0].device)
            if self._budgets is not None:
                fk.foreach_row_topk_prune_(weights, norms, [self._budgets[t.name] for t in targets], bad=flags)
            else:
                for weight, norm, flag in zip(weights, norms, flags.split(1), strict=True):
                    fk.nm_prune_(weight, norm, *self._config.nm, bad=flag)
            for target, weight, flag in zip(targets, weights, flags.tolist(), strict=True):
                refuse_bad(target.name, flag)
                update_offload_parameter(target.module, "weight", weight)
                del self._pending[target.module], self._inputs[target.name]


def _measure(engine: Engine, windows: list[Tensor]) -> Statistics:
    """Statistics over windows of any lengths: those of one length run together, and their sums are added."""
    by_length: dict[int, list[Tensor]] = {}
    for ids in windows:
        by_length.setdefault(len(ids), []).append(ids)
    modules = {target.name: target.module for target in engine.targets}
    total = StatisticsSums(modules)
    for ids in by_length.values():
        sums = StatisticsSums(modules)
        engine.measure(torch.stack(ids), sums, backward=True, label="calibrate (forward and backward)")
        total.merge(sums.tensors())
    with warnings.catch_warnings():  # on_calibration_end() names the modules that no token reached
        warnings.filterwarnings("ignore", ".* saw no calibration token")
        return Statistics.of_sums(total.tensors(), engine.targets, "empirical", engine.device)


def _windows(samples: Iterable) -> list[Tensor]:
    """Token ids [L] of each calibration sample.

    The pipeline reads the same samples afterwards, so the state of torch's global generator, which a shuffling loader
    uses, is restored.

    Raises:
        UserError: a batch is padded or holds more than text, or there is none.
    """
    windows: list[Tensor] = []
    with torch.random.fork_rng(devices=[]):
        for batch in samples:
            extra = set(batch) - _TEXT_KEYS
            if extra or "input_ids" not in batch:
                raise UserError(
                    f"FWandaModifier reads text only (input_ids), got batches of {', '.join(sorted(batch))}"
                )
            ids, mask = batch["input_ids"], batch.get("attention_mask")
            if mask is not None and not bool(mask.all()):
                raise UserError(
                    "the calibration batches are padded, and padding would count as text; use batch_size=1 or "
                    'data_collator="truncation"'
                )
            windows.extend(ids)
    if not windows:
        raise UserError("FWandaModifier needs calibration samples, got an empty dataset")
    return windows


def _check_weight(name: str, module: nn.Module) -> None:
    """Refuse a module without a plain weight matrix in bf16, fp16 or fp32, or one that is already quantised."""
    status = getattr(module, "quantization_status", None)
    if getattr(status, "value", status) in _CALIBRATED:
        raise UserError(f"{name} is quantised ({type(module).__name__}); prune before quantising")
    check_linear(name, module)


def _refuse_shared(model: nn.Module, targets: list[Target]) -> None:
    """Refuse a target whose weight another module uses too."""
    chosen = {id(t.module.weight): t for t in targets}
    for name, module in model.named_modules():
        target = chosen.get(id(module._parameters.get("weight")))
        if target is not None and module is not target.module:
            raise UserError(f"{target.name} shares its weight with {name}; add it to ignore, or untie the weights")


@contextmanager
def use_fwanda_kernels() -> Iterator[None]:
    """Let the host's WandaPruningModifier and SparseGPTModifier prune with our kernels inside the `with` block.

    The host still computes statistics, counts and the Cholesky factor, so the masks stay the same:

    - Wanda, unstructured: the same bits, ties included. With a pattern n:m, the host's torch.topk may remove any of
      several equal scores; ours removes the lowest column.
    - SparseGPT: each block of columns loses int(s * size) + 1 weights, as many as the host's threshold removes if no
      scores are equal. From the same inputs, a layer's weights are equal but for fp32 rounding, and its mask is equal
      but for scores at the cut that rounding decides. Over many layers such differences grow, as they do in the host
      alone if the number of threads changes.
    - SparseGPT, if a Hessian has no Cholesky factor: the host uses the identity instead. Here the damping is raised,
      with a warning.
    - The host keeps what our kernels do not serve: `preserve_sparsity_mask`, and patterns that do not divide both the
      columns and block_size.

    Raises:
        UserError: a layer is quantised or parametrised when calibration starts; in Wanda, its weight or inputs are not
            finite; in SparseGPT, its Hessian has no factor. The message names the layer.
    """
    names: dict[nn.Module, str] = {}
    start = SparsityModifierBase.on_calibration_start

    def checked_start(modifier, state, event, **kwargs):
        start(modifier, state, event, **kwargs)
        for module, name in modifier._module_names.items():
            names[module] = name.rstrip(".")
            if isinstance(module, nn.Linear):
                _check_weight(names[module], module)

    with (
        patch_attr(SparsityModifierBase, "on_calibration_start", checked_start),
        patch_attr(wanda, "sparsify_weight", partial(_wanda_weight, wanda.sparsify_weight, names)),
        patch_attr(sparsegpt, "sparsify_weight", partial(_sparsegpt_weight, sparsegpt.sparsify_weight, names)),
    ):
        yield


def _wanda_weight(stock, names, *, module, row_scalars_dict, sparsity, prune_n, prune_m) -> Tensor:
    """Replaces the host's Wanda selection `stock`; returns a pruned copy of the weight."""
    if not isinstance(module, nn.Linear):
        return stock(module, row_scalars_dict, sparsity, prune_n, prune_m)
    weight = module.weight.detach().clone()
    scale, cols = row_scalars_dict.pop(module).sqrt(), weight.shape[1]
    bad = torch.zeros(1, dtype=torch.int32, device=weight.device)
    if prune_n:
        whole, rest = cols - cols % prune_m, cols % prune_m
        fk.nm_prune_(weight[:, :whole], scale[:whole], kept_of(prune_n, prune_m), prune_m, bad=bad)
        if rest:
            fk.row_topk_prune_(weight[:, whole:], scale[whole:], rest - prune_n, bad=bad)
    else:
        fk.row_topk_prune_(weight, scale, cols - int(cols * sparsity), bad=bad)
    refuse_bad(names.get(module, "a layer"), int(bad))
    return weight


def _sparsegpt_weight(
    stock,
    names,
    *,
    module,
    hessians_dict,
    sparsity,
    prune_n,
    prune_m,
    block_size,
    dampening_frac,
    preserve_sparsity_mask,
) -> tuple[float, Tensor]:
    """The host's SparseGPT sweep: returns its loss and the pruned copy of the weight."""
    uneven = prune_n and (module.weight.shape[1] % prune_m or block_size % prune_m)
    if not isinstance(module, nn.Linear) or preserve_sparsity_mask or uneven:
        return stock(
            module, hessians_dict, sparsity, prune_n, prune_m, block_size, dampening_frac, preserve_sparsity_mask
        )
    before = module.weight.detach().float()
    hessian = hessians_dict.pop(module)
    dead = hessian.diagonal() == 0
    hessian.diagonal().masked_fill_(dead, 1)
    before = before.masked_fill(dead, 0)
    factor = _host_factor(names.get(module, "a layer"), hessian, dampening_frac)
    if prune_n:
        selection: dict = {"pattern": (kept_of(prune_n, prune_m), prune_m)}
    else:
        selection = {"sparsity": _host_fraction(*before.shape, sparsity, block_size)}
    after = before.clone()
    fk.obs_prune_(after, factor=factor, block=block_size, **selection)
    errors = torch.linalg.solve_triangular(factor, before - after, upper=True, left=False)
    return float(errors.square().sum()) / 2, after.to(module.weight.dtype)


def _host_factor(name: str, hessian: Tensor, damping: float) -> Tensor:
    """Upper Cholesky factor of the inverse of the damped Hessian, in the host's order of operations."""

    def factorise(stronger: float) -> Tensor | None:
        damped = hessian.clone()
        damped.diagonal().add_(stronger * hessian.diagonal().mean())
        try:
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
            return torch.linalg.cholesky(inverse, upper=True)
        except torch.linalg.LinAlgError:
            return None

    return damped_factor(name, factorise, damping)


def _host_fraction(rows: int, cols: int, sparsity: float, block: int) -> Fraction:
    """The fraction by which obs_prune_() removes int(sparsity * size) + 1 entries of each block of columns.

    It takes floor(f R b) - floor(f R a) of block [a, b). The smallest f that reaches the host's count both at the end
    of the whole blocks and at the last column meets all of them.
    """
    whole, rest = divmod(cols, block)
    of_block = int(rows * block * sparsity) + 1
    total = whole * of_block + (int(rows * rest * sparsity) + 1 if rest else 0)
    fraction = Fraction(total, rows * cols)
    return max(fraction, Fraction(of_block, rows * block)) if whole else fraction


ModifierFactory.register("FWandaModifier", FWandaModifier)
