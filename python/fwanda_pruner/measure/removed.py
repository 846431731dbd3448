"""What the loss of a pruned model would gain if its removed weights came back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

import fwanda_kernels as fk

from ..engine.sums import Sums
from ..model.attributes import replaced
from ..model.targets import Target


class RemovedWeightSums(Sums):
    """Sums of -dL/dW_ij * W_ij over the removed weights of each row and column of a pruned model.

    While windows run, the modules of the targets compute with pruned weights. Their backward pass reduces the
    derivative towards each removed weight at once, so that no weight gradient is kept. The pruned weights are formed in
    each call, at the speed of a copy: to keep them would take the memory of a second model.

    Tensors, for each name: `name.rows` [R] and `name.columns` [C] fp64, the sums over all passes; `name.row_squares`
    and `name.column_squares`, the squares of the sums of each pass, added up; `name.passes` [] int64.

    Args:
        targets: the matrices.
        packed: name -> [R, ceil(C / 8)] uint8, their masks as fk.pack_mask() packs them.
    """

    uncompiled = "the pruned model"

    def __init__(self, targets: Sequence[Target], packed: Mapping[str, Tensor]):
        super().__init__()
        self._targets, self._packed = targets, packed

    def __enter__(self) -> RemovedWeightSums:
        forwards: dict[nn.Module, Callable] = {
            target.module: partial(_forward, target, partial(self._pruned, target), partial(self._add_gains, target))
            for target in self._targets
        }
        self._replaced = replaced("forward", forwards)
        self._replaced.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._replaced.__exit__(*exception)

    def _pruned(self, target: Target) -> Tensor:
        """The pruned weight [R, C] of a matrix."""
        return fk.masked_weight(target.weight, self._packed[target.name])

    def _add_gains(self, target: Target, gradient: Tensor, x: Tensor) -> None:
        tokens = gradient.flatten(0, -2), x.flatten(0, -2)
        self.add(target.name, *fk.removed_sums(*tokens, target.weight, self._packed[target.name]))

    def add(self, name: str, rows: Tensor, columns: Tensor) -> None:
        """Adds what one pass found in a matrix: sums [R] and [C] fp64."""
        lines, totals = (rows, columns), self._totals
        if f"{name}.passes" not in totals:
            totals[f"{name}.rows"], totals[f"{name}.columns"] = lines
            totals[f"{name}.row_squares"], totals[f"{name}.column_squares"] = rows.square(), columns.square()
            totals[f"{name}.passes"] = torch.tensor(1, dtype=torch.int64, device="cpu")
            return
        torch._foreach_add_((totals[f"{name}.rows"], totals[f"{name}.columns"]), lines)
        torch._foreach_addcmul_((totals[f"{name}.row_squares"], totals[f"{name}.column_squares"]), lines, lines)
        totals[f"{name}.passes"] += 1


def _forward(
    target: Target, pruned: Callable[[], Tensor], add: Callable[[Tensor, Tensor], None], input: Tensor
) -> Tensor:
    y = _PrunedLinear.apply(input, pruned, add)
    bias = target.module.bias
    return y if bias is None else y + bias


class _PrunedLinear(torch.autograd.Function):
    """x W'^T with the pruned weight W'. Its backward pass hands the gradient at its outputs and x to add()."""

    @staticmethod
    def forward(ctx, x: Tensor, pruned: Callable[[], Tensor], add: Callable[[Tensor, Tensor], None]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.parts = pruned, add
        return nn.functional.linear(x, pruned())

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (x,) = ctx.saved_tensors
        pruned, add = ctx.parts
        add(gradient, x)
        return gradient @ pruned(), None, None
