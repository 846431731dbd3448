"""Wanda and F-Wanda as pruning methods of torch.nn.utils.prune.

    with fk.collect_statistics({"fc": model.fc}) as stats:
        model(calibration)
    wanda_unstructured(model.fc, "weight", stats, amount=0.5)
    prune.remove(model.fc, "weight")

All three functions take the same `statistics`: the collector itself, whatever its keys, or another mapping with an
entry (module, "weight"). For one module, its LayerStatistics alone does too.

As in the host, `amount` is a fraction of the weights that are not pruned yet: 0.5 twice removes three quarters. Pruned
weights stay pruned. Unlike in the host, the fraction is read as an exact decimal. An integer, which the host takes as a
number of weights, is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from fractions import Fraction
from numbers import Integral

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import fwanda_kernels as fk

from ..allocate.budgets import global_budgets, keep_total
from ..config import PruneConfig
from ..errors import UserError, one_line, show
from . import check_linear, check_version
from ._budgets import (
    check_finite,
    checked_mask,
    exact_fraction,
    gradients_seen,
    measured_norm,
    refuse_bad,
    row_budgets,
)

check_version("torch", torch.__version__, "2.10", "2.13")


Statistics = Mapping[tuple[nn.Module, str], fk.LayerStatistics] | fk.collect_statistics | fk.LayerStatistics


class WandaUnstructured(prune.BasePruningMethod):
    """Keep the keep[i] weights of row i with the largest |W_ij| * scale_j, among those that are not pruned yet.

    Args:
        scale: [C] fp32, finite and >= 0: the norm of each input column.
        keep: int, or [R] int64: weights kept in each row. A row with fewer unpruned weights keeps all of them.

    If the host passes `importance_scores`, these are used in place of W.

    Tie rule: among equal scores the lowest column is removed first.
    Source: Sun et al. 2024 (Wanda), equation 1; with a budget for each row, the F-Wanda paper, algorithm 1.
    """

    PRUNING_TYPE = "global"  # makes a PruningContainer pass whole matrices and not flat lists of weights

    def __init__(self, scale: Tensor, keep: int | Tensor):
        self.scale, self.keep = scale, keep

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Return the mask: [R, C] in the dtype of default_mask, 1 = kept, and 0 where default_mask is 0."""
        among = default_mask != 0
        mask = checked_mask(fk.row_topk_mask, "WandaUnstructured", t.detach(), self.scale, self.keep, among=among)
        return mask.to(default_mask.dtype)


class _Selected(WandaUnstructured):
    """Takes a ready mask as its `importance_scores`: all masks are made before the host changes any module."""

    def __init__(self):
        pass

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        return t


def wanda_unstructured(
    module: nn.Module, name: str, statistics: Statistics, amount: float | str | Fraction
) -> nn.Module:
    """Prune a linear module by Wanda: each row loses floor(amount * its unpruned weights).

    Args:
        module: nn.Linear, on the device of the statistics. The host reparametrises it in place.
        name: "weight".
        statistics: with an entry for this module, see the top of this file; x2 is read.
        amount: fraction of the unpruned weights of each row, an exact decimal in [0, 1).

    Returns:
        The module, with `weight_orig` and `weight_mask` as after any method of the host.

    Raises:
        UserError: the module cannot be pruned, the statistics are of another module or device, or amount is not a
            fraction in [0, 1).
    """
    removed, statistics = _fraction(amount), _layer(statistics, module, name)
    _check(module, name, statistics)
    scale, among = measured_norm(_title(module), statistics), _unpruned(module)
    if among is None:
        keep = keep_total(module.in_features, removed)
    else:
        counts, row = among.sum(1).unique(return_inverse=True)
        keep = torch.tensor([keep_total(n, removed) for n in counts.tolist()], dtype=torch.int64, device=scale.device)[
            row
        ]
    _prune([module], [scale], [keep], [among])
    return module


def fwanda_unstructured(
    module: nn.Module,
    name: str,
    statistics: Statistics,
    amount: float | str | Fraction,
    *,
    power: float = 0.5,
) -> nn.Module:
    """Prune a linear module by F-Wanda: row budgets are proportional to omega^power.

    The matrix loses floor(amount * its unpruned weights). Arguments, result and errors are those of
    wanda_unstructured(); g2 is read too, so backward() must run on the SUM of the token losses.

    Raises:
        UserError: also if no backward pass ran, or if rows have different numbers of unpruned weights, since then no
            exact budget may exist.
    """
    removed, statistics = _fraction(amount), _layer(statistics, module, name)
    _check(module, name, statistics)
    title, among = _title(module), _unpruned(module)
    rows, least = module.weight.shape
    if among is not None:
        least, most = torch.stack(among.sum(1).aminmax()).tolist()
        if least < most:
            raise UserError(f"{title} has {least} to {most} unpruned weights in a row; F-Wanda needs equal rows")
    scale = measured_norm(title, statistics)
    keep = row_budgets(title, statistics, keep_total(rows * least, removed), k_max=least, power=power)
    _prune([module], [scale], [keep], [among])
    return module


def global_fwanda_unstructured(
    parameters: Iterable[tuple[nn.Module, str]],
    statistics: Statistics,
    amount: float | str | Fraction,
    *,
    row_exponent: float = 0.75,
    layer_exponent: float = 0.5,
) -> None:
    """Prune many linear modules against one threshold by F-Wanda's global allocation.

    Args:
        parameters: (module, "weight") tuples as for prune.global_unstructured(), of nn.Linear on one device. The host
            reparametrises them in place.
        statistics: with an entry for each module; x2 is read, and g2 from the SUM of the token losses.
        amount: fraction of the unpruned weights of all modules together, an exact decimal in [0, 1).
        row_exponent: damping exponent across rows.
        layer_exponent: damping exponent across modules.

    Raises:
        UserError: as for wanda_unstructured(); nothing is pruned then.
    """
    removed = _fraction(amount)
    pairs = None
    with contextlib.suppress(TypeError):  # what cannot be iterated over, such as an array without dimensions
        pairs = list(parameters)
    if pairs is None or not all(map(_is_parameter, pairs)):
        raise UserError(f"parameters must be a list of (module, name) tuples, got {show(parameters)}")
    parameters = pairs
    if not parameters or len(set(parameters)) < len(parameters):
        raise UserError(f"parameters must be different (module, name) tuples, at least one, got {len(parameters)}")
    modules, layers = [module for module, _ in parameters], [_layer(statistics, *p) for p in parameters]
    for (module, name), layer in zip(parameters, layers, strict=True):
        _check(module, name, layer)
    _expect_own_weights(modules)
    titles = [_title(module) for module in modules]
    if not any(gradients_seen(titles, layers)):
        raise UserError("no module has an output gradient: run backward() on the SUM of the losses while collecting")
    amongs = [_unpruned(module) for module in modules]
    sizes = [module.weight.numel() for module in modules]
    left = [_left(module, among) for module, among in zip(modules, amongs, strict=True)]
    total = keep_total(int(torch.cat(left).sum()), removed)
    if not total:  # nothing is left to be ranked
        _prune(modules, [torch.ones_like(layer.x2) for layer in layers], [torch.zeros_like(k) for k in left], amongs)
        return
    config = PruneConfig(
        method="fwanda",
        allocation="global",
        sparsity=str(Fraction(sum(sizes) - total, sum(sizes))),
        row_exponent=row_exponent,
        layer_exponent=layer_exponent,
    )
    counts = _global_counts(config, modules, layers)
    scales = [measured_norm(title, layer) for title, layer in zip(titles, layers, strict=True)]
    _prune(modules, scales, _within(counts, left), amongs)


def _expect_own_weights(modules: list[nn.Linear]) -> None:
    """Refuse modules that share a weight: one mask could not serve two."""
    seen: dict[int, int] = {}
    for i, module in enumerate(modules):
        weight = getattr(module, "weight_orig", module.weight)
        first = seen.setdefault(weight.data_ptr(), i) if weight.numel() else i
        if first != i:
            raise UserError(f"parameters[{first}] and [{i}] share a weight of {_title(module)}; give only one of them")


def _is_parameter(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], nn.Module) and isinstance(pair[1], str)


def _layer(statistics: Statistics, module: nn.Module, name: str) -> fk.LayerStatistics:
    """The entry of a module.

    Raises:
        UserError: there is none, or the statistics are of another type.
    """
    if isinstance(statistics, fk.LayerStatistics):
        return statistics
    if not isinstance(statistics, (fk.collect_statistics, Mapping)):
        raise UserError(
            f"statistics must be a LayerStatistics, a collect_statistics or a mapping, got {type(statistics).__name__}"
        )
    found = None
    with contextlib.suppress(KeyError, TypeError):  # TypeError: a key that cannot be hashed
        found = statistics.of(module) if isinstance(statistics, fk.collect_statistics) else statistics[module, name]
    if not isinstance(found, fk.LayerStatistics):
        raise UserError(f"statistics has no entry ({_title(module)}, {show(name)}); was the module called at all?")
    return found


def _left(module: nn.Linear, among: Tensor | None) -> Tensor:
    """Number of unpruned weights in each row: [R] int64."""
    rows, cols = module.weight.shape
    return torch.full((rows,), cols, dtype=torch.int64, device=module.weight.device) if among is None else among.sum(1)


def _global_counts(config: PruneConfig, modules: list[nn.Linear], layers: list[fk.LayerStatistics]) -> list[Tensor]:
    """Call global_budgets(); if it refuses NaN or inf, name the module in the message.

    Raises:
        UserError: a value is not finite, or the weights overlap in memory.
    """
    try:
        return global_budgets(config, [module.weight.detach() for module in modules], layers)
    except ValueError as error:
        for module, layer in zip(modules, layers, strict=True):
            check_finite(f"{_title(module)}.weight", module.weight.detach())
            check_finite(f"the input of {_title(module)}", layer.x2)
        if isinstance(error, UserError):
            raise
        raise UserError(f"the modules cannot be ranked together: {one_line(error)}") from error


def _within(counts: list[Tensor], left: list[Tensor]) -> list[Tensor]:
    """Lower counts that exceed the unpruned weights of a row, and keep the total.

    This can happen only if the threshold is 0: pruned weights then tie with unpruned weights of score 0. The excess
    goes to the last rows that have room, since among equal scores the first are removed.
    """
    sizes = [len(k) for k in counts]
    count, most = torch.cat(counts), torch.cat(left)
    within = torch.minimum(count, most)
    room = most - within
    after = room.flip(0).cumsum(0).flip(0) - room
    within += torch.minimum(room, ((count.sum() - within.sum()) - after).clamp(min=0))
    return list(within.split(sizes))


def _title(module: nn.Module) -> str:
    shape = (getattr(module, "in_features", "?"), getattr(module, "out_features", "?"))
    return f"{type(module).__name__}({shape[0]}, {shape[1]})"


def _fraction(amount: float | str | Fraction) -> Fraction:
    if isinstance(amount, Integral):
        raise UserError(f"amount must be a fraction, e.g. 0.5, not a number of weights, got {show(amount)}")
    return exact_fraction("amount", amount)


def _check(module: nn.Module, name: str, statistics: fk.LayerStatistics) -> None:
    """Refuse a module that cannot be pruned, and statistics of another module or device."""
    if not isinstance(name, str) or name != "weight":
        raise UserError(f"name must be 'weight': only that can be ranked by the inputs of the module, got {show(name)}")
    check_linear(type(module).__name__, module, pruned=True)
    weight, sums = module.weight, (statistics.g2, statistics.x2)
    got = [None if s is None else (list(s.shape), str(s.device)) for s in sums]
    if any(g not in (None, ([size], str(weight.device))) for g, size in zip(got, weight.shape, strict=True)):
        raise UserError(
            f"the statistics are of another module or device: {_title(module)} on {weight.device} needs g2 [R], x2 [C] "
            f"for [R, C] = {list(weight.shape)}, got {got}"
        )


def _unpruned(module: nn.Linear) -> Tensor | None:
    """[R, C] bool, True where a weight is not pruned yet; None if the module is not pruned at all."""
    mask = getattr(module, "weight_mask", None)
    return None if mask is None else mask != 0


def _prune(
    modules: list[nn.Linear], scales: list[Tensor], keeps: list[int | Tensor], amongs: list[Tensor | None]
) -> None:
    """Make all masks, then give them to the host. If a value is refused, no module has changed."""
    weights = [module.weight.detach() for module in modules]
    flags = torch.zeros(len(modules), dtype=torch.int32, device=weights[0].device)
    masks = [
        fk.row_topk_mask(weight, scale, keep, among=among, bad=bad)
        for weight, scale, keep, among, bad in zip(weights, scales, keeps, amongs, flags.split(1), strict=True)
    ]
    for module, code in zip(modules, flags.tolist(), strict=True):
        refuse_bad(_title(module), code)
    for module, weight, mask in zip(modules, weights, masks, strict=True):
        _Selected.apply(module, "weight", importance_scores=mask.to(weight.dtype))
