"""For forks of the Wanda reference (locuslab/wanda): its names and running mean, its selection on the kernels.

    from fwanda_pruner.integrations.wanda_style import WrappedGPT, wanda_mask

`WrappedGPT` takes the place of the fork's class. The lines of the fork that sort or loop over groups become one call:

    W_mask = wanda_mask(subset[name].weight.data, wrapped_layers[name].scaler_row, ratio, prune_n, prune_m)

As in the fork, W_mask is True where a weight is REMOVED, and prune_n of every prune_m go.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fwanda_kernels as fk

from ..errors import UserError
from . import check_linear, kept_of


class WrappedGPT:
    """Running mean over samples of the squared norm of each input column of a linear layer.

    Args:
        layer: nn.Linear.
        layer_id, layer_name: kept as they are.

    Attributes:
        scaler_row: [C] fp32, sum over tokens of x_j^2, divided by nsamples.
        nsamples: sequences seen; a 2-D input counts as one.
        layer, dev, rows, columns: the layer, the device and the shape of its weight.

    Raises:
        UserError: the layer is not linear, or its weight is quantised or parametrised.

    scaler_row has the bits of the reference's, which accumulates in fp32: masks from it are then equal too.
    """

    def __init__(self, layer: nn.Linear, layer_id: int = 0, layer_name: str = "none"):
        check_linear(layer_name if layer_name != "none" else "layer", layer)
        self.layer, self.layer_id, self.layer_name = layer, layer_id, layer_name
        self.dev = layer.weight.device
        self.rows, self.columns = layer.weight.shape
        self.scaler_row = torch.zeros(self.columns, device=self.dev)
        self.nsamples = 0

    def add_batch(self, inp: Tensor, out: Tensor | None) -> None:
        """Add one batch.

        Args:
            inp: [B, L, C] or [L, C] input of the layer, without padding.
            out: not used.
        """
        batch = 1 if inp.dim() == 2 else inp.shape[0]
        norm = torch.linalg.vector_norm(inp.reshape(-1, inp.shape[-1]).float(), dim=0)
        self.scaler_row *= self.nsamples / (self.nsamples + batch)
        self.nsamples += batch
        self.scaler_row += norm.square() / self.nsamples


def wanda_mask(
    weight: Tensor, scaler_row: Tensor, sparsity_ratio: float = 0.5, prune_n: int = 0, prune_m: int = 0
) -> Tensor:
    """The reference's W_mask: the lowest |W_ij| * sqrt(scaler_row_j), bit for bit.

    Args:
        weight: [R, C] bf16|fp16|fp32, finite.
        scaler_row: [C] fp32, of WrappedGPT.
        sparsity_ratio: unstructured: each row loses int(C * sparsity_ratio), the reference's binary floor.
        prune_n: with prune_n > 0, PRUNE prune_n of every prune_m columns instead; a last, shorter group loses prune_n
            too. 2:4 is the same in both conventions, 1:4 here is keep 3 of 4.
        prune_m: columns in a group.

    Returns:
        [R, C] bool, True = REMOVED.

    Raises:
        UserError: the ratio or the pattern does not fit.
        ValueError: a shape, dtype or device does not fit, or a value is not finite.

    Tie rule: the lowest column is removed first. The reference's unstructured sort is stable and does the same. Its n:m
    selection is a topk, which leaves it open which of equal scores at the cut goes: without such ties the masks are
    equal, with them this one is still defined and the count is the same.
    """
    bad = torch.zeros(1, dtype=torch.int32, device=weight.device)
    masks = [
        fk.row_topk_mask(part, scale, keep, bad=bad) if m is None else fk.nm_mask(part, scale, keep, m, bad=bad)
        for part, scale, keep, m in _parts(weight, scaler_row, sparsity_ratio, prune_n, prune_m)
    ]
    if int(bad):
        raise ValueError(fk.bad_message("wanda_mask", int(bad)))
    return (masks[0] if len(masks) == 1 else torch.cat(masks, dim=1)).logical_not_()


def wanda_prune_(
    weight: Tensor, scaler_row: Tensor, sparsity_ratio: float = 0.5, prune_n: int = 0, prune_m: int = 0
) -> None:
    """Set the weights of wanda_mask() to zero, in place: `W[wanda_mask(...)] = 0` without the mask.

    Arguments, errors and tie rule are those of wanda_mask().
    """
    for part, scale, keep, m in _parts(weight, scaler_row, sparsity_ratio, prune_n, prune_m):
        if m is None:
            fk.row_topk_prune_(part, scale, keep)
        else:
            fk.nm_prune_(part, scale, keep, m)


def _parts(
    weight: Tensor, scaler_row: Tensor, sparsity_ratio: float, prune_n: int, prune_m: int
) -> list[tuple[Tensor, Tensor, int, int | None]]:
    """(columns of the weight, their scale, number kept in a row or group, group size or None) that make the matrix."""
    cols = weight.shape[1]
    if scaler_row.shape != (cols,):
        raise UserError(f"scaler_row must be [C]=[{cols}], got {list(scaler_row.shape)}")
    scale = scaler_row.sqrt()
    if prune_n == 0:
        if not 0 <= sparsity_ratio <= 1:
            raise UserError(f"sparsity_ratio must be in [0, 1], got {sparsity_ratio}")
        return [(weight, scale, cols - int(cols * sparsity_ratio), None)]
    keep, tail = kept_of(prune_n, prune_m), cols % prune_m
    if 0 < tail < prune_n:
        raise UserError(f"{cols} columns leave a last group of {tail}, too short to prune {prune_n} of {prune_m}")
    whole = cols - tail
    parts = [(weight[:, :whole], scale[:whole], keep, prune_m)] if whole else []
    return parts + ([(weight[:, whole:], scale[whole:], tail - prune_n, None)] if tail else [])
