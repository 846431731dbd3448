"""Whether the update of the weights that stay is kept, block by block: only if the held-out loss falls.

An update by Optimal Brain Surgeon repairs the outputs of each matrix on the calibration text, not the loss. Where the
mask was chosen by the loss, it can make a good mask worse.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

import fwanda_kernels as fk

from ..allocate.judge import Judge
from ..allocate.masks import PackedMasks


class Refit:
    """Accepts or takes back the updates of blocks, so that the result is never worse than the masks alone.

    Args:
        judge: compares pruned models.
        masks: fixed, of all matrices. They apply to the blocks that are not pruned yet.
    """

    def __init__(self, judge: Judge, masks: PackedMasks):
        self._judge, self._masks = judge, masks
        self._best: tuple[bool, float] | None = None

    def begin(self) -> None:
        """Call it before a block is updated: measures the model as it is, if that is not known."""
        if self._best is None:
            self._best = self._rank()

    def settle(self, weights: Mapping[str, Tensor], dense: Mapping[str, Tensor]) -> bool:
        """Keeps the updated weights of a block if the loss falls; otherwise it gets its dense weights under the masks.

        Args:
            weights: name -> [R, C] updated weight of the block, in the model.
            dense: name -> [R, C] its dense weight.

        Returns:
            Whether the update was kept.
        """
        rank = self._rank()
        if rank < self._best:
            self._best = rank
            return True
        for name, weight in weights.items():
            weight.copy_(fk.masked_weight(dense[name], self._masks.packed[name]))
        return False

    def _rank(self) -> tuple[bool, float]:
        return self._judge.rank(self._judge.losses(self._masks))
