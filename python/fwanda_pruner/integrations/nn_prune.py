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

from ..budgets import global_budgets
from ..config import PruneConfig
from ..errors import UserError
from . import check_linear, check_version
from ._budgets import check_finite, checked_norm, exact_fraction, kept, row_budgets

check_version("torch", torch.__version__, "2.10", "2.13")


class WandaUnstructured(prune.BasePruningMethod):
    """Keep the keep[i] weights of each row with the largest |W_ij| * scale_j, never one that is pruned already.

    Args:
        scale: [C] fp32, finite and >= 0: the norm of each input column.
        keep: [R] int64, kept per row; where fewer are left unpruned, all of those.

    Tie rule: among equal scores the lowest column is removed first. With `importance_scores` these take the place of W.
    Source: Sun et al. 2024 (Wanda), equation 1; with budgets, the paper, algorithm 1.
    """

    PRUNING_TYPE = "global"  # a PruningContainer then passes whole matrices, so that a row stays a row

    def __init__(self, scale: Tensor, keep: Tensor):
        self.scale, self.keep = scale, keep

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """[R, C] mask in the dtype of default_mask, 1 = kept, 0 wherever default_mask is."""
        weight = t.detach()
        if int(default_mask.count_nonzero()) == default_mask.numel():
            return fk.row_topk_mask(weight, self.scale, self.keep).to(default_mask.dtype)
        pruned = default_mask == 0
        weight = weight.masked_fill(pruned, 0)
        mask = fk.row_topk_mask(weight, self.scale, self.keep)
        if bool((mask & pruned).any()):
            mask = self._among_unpruned(weight, pruned)
        return mask.to(default_mask.dtype)

    def _among_unpruned(self, weight: Tensor, pruned: Tensor) -> Tensor:
        """The mask where pruned weights tie with others of score 0: they come first in their row, so they go first."""
        order = (~pruned).byte().argsort(dim=1, stable=True)
        scores = (weight.float().abs() * self.scale).clamp(max=torch.finfo(torch.float32).max).gather(1, order)
        kept = fk.row_topk_mask(scores, torch.ones_like(self.scale), self.keep)
        return torch.empty_like(kept).scatter_(1, order, kept) & ~pruned


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
    mask = _mask(module, name, statistics)
    scale = checked_norm(_title(module), statistics)
    left = mask.count_nonzero(1).tolist()
    kept_of_left = {count: kept(count, removed) for count in set(left)}
    keep = torch.tensor([kept_of_left[count] for count in left], device=mask.device)
    WandaUnstructured.apply(module, name, scale=scale, keep=keep)
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
    mask = _mask(module, name, statistics)
    title = _title(module)
    left = mask.count_nonzero(1).tolist()
    if len(set(left)) > 1:
        raise UserError(f"{title} has {min(left)} to {max(left)} unpruned weights in a row; F-Wanda needs equal rows")
    scale = checked_norm(title, statistics)
    total = kept(sum(left), removed)
    keep = row_budgets(title, statistics, total, k_max=left[0], power=power)
    WandaUnstructured.apply(module, name, scale=scale, keep=keep)
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
    masks = []
    for module, name in parameters:
        if (module, name) not in statistics:
            raise UserError(f"statistics has no entry ({_title(module)}, {name!r}); was the module ever called?")
        masks.append(_mask(module, name, statistics[module, name]))
        check_finite(f"the output gradient of {_title(module)}", statistics[module, name].g2)
    layers = [statistics[p] for p in parameters]
    if not any(bool(s.g2.any()) for s in layers):
        raise UserError("no module has an output gradient: run backward() on the SUM of the losses while collecting")
    left = [mask.count_nonzero(1) for mask in masks]
    total, size = kept(sum(int(k.sum()) for k in left), removed), sum(mask.numel() for mask in masks)

    config = PruneConfig(
        method="fwanda",
        allocation="global",
        sparsity=str(Fraction(size - total, size)),
        row_exponent=row_exponent,
        layer_exponent=layer_exponent,
    )
    keeps = _within(global_budgets(config, [module.weight.detach() for module, _ in parameters], layers), left)
    scales = [checked_norm(_title(m), s) for (m, _), s in zip(parameters, layers, strict=True)]
    for (module, name), scale, keep in zip(parameters, scales, keeps, strict=True):
        WandaUnstructured.apply(module, name, scale=scale, keep=keep)


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


def _mask(module: nn.Module, name: str, statistics: fk.LayerStatistics) -> Tensor:
    """[R, C] bool, True where not pruned yet.

    Raises:
        UserError: the module cannot be pruned, or the statistics are not its own.
    """
    if name != "weight":
        raise UserError(f"only the weight of a linear module can be ranked by its inputs, got name {name!r}")
    check_linear(type(module).__name__, module, pruned=True)
    weight = module.weight.detach()
    got = [(list(s.shape), str(s.device)) for s in (statistics.g2, statistics.x2)]
    if got != [([size], str(weight.device)) for size in weight.shape]:
        raise UserError(
            f"the statistics are of another module or device: {_title(module)} on {weight.device} needs g2 [R], x2 [C] "
            f"of {list(weight.shape)}, got {got}"
        )
    check_finite(f"{_title(module)}.weight", weight)
    mask = getattr(module, "weight_mask", None)
    return torch.ones_like(weight, dtype=torch.bool) if mask is None else mask != 0
