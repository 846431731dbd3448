"""What the loss of a pruned model would gain if its removed weights came back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ..engine.masks_in_passing import MaskFunctions
from ..engine.sums import Sums
from ..model.attributes import replaced
from ..model.targets import Target


class RemovedWeightSums(Sums):
    """Sums of -dL/dW_ij * W_ij over the removed weights of each row and column of a pruned model.

    While windows run, the modules of the targets compute with pruned weights. Their backward pass forms the derivative
    of the loss towards each removed weight and adds it up at once, so that no weight gradient is kept.

    Tensors, for each name: `name.rows` [R] and `name.columns` [C] fp64, the sums over all passes; `name.row_squares`
    and `name.column_squares`, the squares of the sums of each pass, added up; `name.passes` [] int64.

    Args:
        targets: the matrices.
        masks: their masks.
    """

    uncompiled = "the pruned model"

    def __init__(self, targets: Sequence[Target], masks: MaskFunctions):
        super().__init__()
        self._targets, self._masks = targets, masks

    def __enter__(self) -> RemovedWeightSums:
        forwards: dict[nn.Module, Callable] = {
            target.module: partial(_forward, target, self._masks[target.name], partial(self.add, target.name))
            for target in self._targets
        }
        self._replaced = replaced("forward", forwards)
        self._replaced.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._replaced.__exit__(*exception)

    def add(self, name: str, rows: Tensor, columns: Tensor) -> None:
        """Adds what one pass found in a matrix: sums [R] and [C] fp64."""
        sums = {"rows": rows, "columns": columns, "row_squares": rows.square(), "column_squares": columns.square()}
        sums["passes"] = torch.tensor(1)
        self.merge({f"{name}.{key}": tensor for key, tensor in sums.items()})


def _forward(target: Target, mask: Callable[[Tensor], Tensor], add: Callable, x: Tensor) -> Tensor:
    y = _PrunedLinear.apply(x, target, mask, add)
    bias = target.module.bias
    return y if bias is None else y + bias


class _PrunedLinear(torch.autograd.Function):
    """x W'^T with the pruned weight W'. Its backward pass adds up -dL/dW' * W over the removed weights."""

    @staticmethod
    def forward(ctx, x: Tensor, target: Target, mask: Callable[[Tensor], Tensor], add: Callable) -> Tensor:
        ctx.save_for_backward(x)
        ctx.parts = target, mask, add
        weight = target.weight
        return nn.functional.linear(x, weight * mask(weight))

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (x,) = ctx.saved_tensors
        target, mask, add = ctx.parts
        weight = target.weight
        kept = mask(weight)
        slope = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        gain = -(slope * weight).float().masked_fill_(kept, 0)
        add(gain.sum(1, dtype=torch.float64), gain.sum(0, dtype=torch.float64))
        return gradient @ (weight * kept), None, None, None
