"""Wanda and F-Wanda as pruning methods of torch.nn.utils.prune.

    with fk.collect_statistics({"fc": model.fc}) as stats:
        model(calibration)
    wanda_unstructured(model.fc, "weight", stats["fc"], amount=0.5)
    prune.remove(model.fc, "weight")

As in the host, `amount` is the fraction of what is not pruned yet: twice 0.5 removes three quarters, and what is pruned
stays pruned. Unlike there it is read as an exact decimal, and a whole number (there: how many) is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import fwanda_kernels as fk

from ..allocate.budgets import global_budgets, keep_total
from ..config import PruneConfig
from ..errors import UserError
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


class WandaUnstructured(prune.BasePruningMethod):
    """Keep the keep[i] weights of each row with the largest |W_ij| * scale_j, never one that is pruned already.

    Args:
        scale: [C] fp32, finite and >= 0: the norm of each input column.
        keep: int, or [R] int64: kept per row; where fewer are left unpruned, all of those.

    Tie rule: among equal scores the lowest column is removed first. With `importance_scores` these take the place of W.
    Source: Sun et al. 2024 (Wanda), equation 1; with budgets, the paper, algorithm 1.
    """

    PRUNING_TYPE = "global"  # a PruningContainer then passes whole matrices, so that a row stays a row

    def __init__(self, scale: Tensor, keep: int | Tensor):
        self.scale, self.keep = scale, keep

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """[R, C] mask in the dtype of default_mask, 1 = kept, 0 wherever default_mask is."""
        among = default_mask != 0
        mask = checked_mask(fk.row_topk_mask, "WandaUnstructured", t.detach(), self.scale, self.keep, among=among)
        return mask.to(default_mask.dtype)


class _Selected(WandaUnstructured):
    """Takes the mask itself for the importance scores: it was found before the host touches the module."""

    def __init__(self):
        pass

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        return t


def wanda_unstructured(
    module: nn.Module, name: str, statistics: fk.LayerStatistics, amount: float | str | Fraction
) -> nn.Module:
    """Prune a linear module by Wanda: each row loses floor(amount * its unpruned weights).

    Args:
        module: nn.Linear, on the device of the statistics; reparametrised in place.
        name: "weight".
        statistics: of collect_statistics() on this module; x2 is read.
        amount: fraction of the unpruned weights of each row, an exact decimal in [0, 1).

    Returns:
        The module, with `weight_orig` and `weight_mask` as after any method of the host.

    Raises:
        UserError: the module, its weight, the statistics or amount do not fit.
    """
    removed = _fraction(amount)
    _check(module, name, statistics)
    scale, among = measured_norm(_title(module), statistics), _unpruned(module)
    if among is None:
        keep = keep_total(module.in_features, removed)
    else:
        counts, row = among.sum(1).unique(return_inverse=True)
        keep = torch.tensor([keep_total(n, removed) for n in counts.tolist()], device=scale.device)[row]
    _prune([module], [scale], [keep], [among])
    return module


def fwanda_unstructured(
    module: nn.Module,
    name: str,
    statistics: fk.LayerStatistics,
    amount: float | str | Fraction,
    *,
    power: float = 0.5,
) -> nn.Module:
    """Prune a linear module by F-Wanda: row budgets proportional to omega^power, the matrix loses floor(amount * left).

    Arguments, result and errors are those of wanda_unstructured(); g2 is read too, of the SUM of the token losses.

    Raises:
        UserError: also, no backward pass ran, or rows have different numbers of unpruned weights: a second pass then
            has no exact budget within those bounds.
    """
    removed = _fraction(amount)
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
    statistics: Mapping[tuple[nn.Module, str], fk.LayerStatistics],
    amount: float | str | Fraction,
    *,
    row_exponent: float = 0.75,
    layer_exponent: float = 0.5,
) -> None:
    """Prune many linear modules against one threshold: F-Wanda's global allocation, as prune.global_unstructured().

    Args:
        parameters: (module, "weight") tuples of nn.Linear on one device; reparametrised in place.
        statistics: (module, "weight") -> LayerStatistics with x2 and g2, of the SUM of the token losses.
        amount: fraction of all unpruned weights together, an exact decimal in [0, 1).
        row_exponent: damping exponent across rows.
        layer_exponent: damping exponent across modules.

    Raises:
        UserError: as wanda_unstructured(); nothing is pruned then.
    """
    removed = _fraction(amount)
    parameters = list(parameters)
    if not parameters or len(set(parameters)) < len(parameters):
        raise UserError(f"parameters must be different (module, name) tuples, at least one, got {len(parameters)}")
    for module, name in parameters:
        if (module, name) not in statistics:
            raise UserError(f"statistics has no entry ({_title(module)}, {name!r}); was the module ever called?")
        _check(module, name, statistics[module, name])
    modules, layers = [module for module, _ in parameters], [statistics[p] for p in parameters]
    titles = [_title(module) for module in modules]
    if not any(gradients_seen(titles, layers)):
        raise UserError("no module has an output gradient: run backward() on the SUM of the losses while collecting")
    amongs = [_unpruned(module) for module in modules]
    sizes = [module.weight.numel() for module in modules]
    left = [_left(module, among) for module, among in zip(modules, amongs, strict=True)]
    total = keep_total(int(torch.cat(left).sum()), removed)
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


def _left(module: nn.Linear, among: Tensor | None) -> Tensor:
    """[R] int64 unpruned weights."""
    rows, cols = module.weight.shape
    return torch.full((rows,), cols, device=module.weight.device) if among is None else among.sum(1)


def _global_counts(config: PruneConfig, modules: list[nn.Linear], layers: list[fk.LayerStatistics]) -> list[Tensor]:
    """global_budgets() of the modules; where it refuses a value, the message names the module."""
    try:
        return global_budgets(config, [module.weight.detach() for module in modules], layers)
    except ValueError:
        for module, layer in zip(modules, layers, strict=True):
            check_finite(f"{_title(module)}.weight", module.weight.detach())
            check_finite(f"the input of {_title(module)}", layer.x2)
        raise


def _within(counts: list[Tensor], left: list[Tensor]) -> list[Tensor]:
    """Counts that nowhere exceed the unpruned weights left, with the same total.

    A count can exceed them only where the threshold is 0, so that pruned weights tie with unpruned ones of score 0; the
    excess then goes to the last of these.
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
    if isinstance(amount, int):
        raise UserError(f"amount must be a fraction, e.g. 0.5; numbers of weights are not taken, got {amount!r}")
    return exact_fraction("amount", amount)


def _check(module: nn.Module, name: str, statistics: fk.LayerStatistics) -> None:
    """Refuse a module that cannot be pruned, and statistics that are not its own."""
    if name != "weight":
        raise UserError(f"only the weight of a linear module can be ranked by its inputs, got name {name!r}")
    check_linear(type(module).__name__, module, pruned=True)
    weight, sums = module.weight, (statistics.g2, statistics.x2)
    got = [None if s is None else (list(s.shape), str(s.device)) for s in sums]
    if any(g not in (None, ([size], str(weight.device))) for g, size in zip(got, weight.shape, strict=True)):
        raise UserError(
            f"the statistics are of another module or device: {_title(module)} on {weight.device} needs g2 [R], x2 [C] "
            f"of {list(weight.shape)}, got {got}"
        )


def _unpruned(module: nn.Linear) -> Tensor | None:
    """[R, C] bool, True where not pruned yet; None where nothing is."""
    mask = getattr(module, "weight_mask", None)
    return None if mask is None else mask != 0


def _prune(
    modules: list[nn.Linear], scales: list[Tensor], keeps: list[int | Tensor], amongs: list[Tensor | None]
) -> None:
    """Find all masks, then hand them to the host: nothing is pruned where a value is refused."""
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
