"""Forks of the Wanda reference (locuslab/wanda) as a host: the same names and statistics, selection by the kernels.

    from fwanda_pruner.integrations.wanda_style import WrappedGPT, wanda_mask

`WrappedGPT` replaces the fork's class of that name. One call replaces the lines that sort scores or loop over groups:

    W_mask = wanda_mask(subset[name].weight.data, wrapped_layers[name].scaler_row, ratio, prune_n, prune_m)

As in the fork, W_mask is True where a weight is REMOVED, and prune_n of every prune_m weights are removed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fwanda_kernels as fk

from ..errors import UserError, show
from . import check_linear, count_of, kept_of, number_of


class WrappedGPT:
    """Running mean over samples of the squared norm of each input column of a linear layer.

    scaler_row has the same bits as the reference's, so masks made from it are the same too.

    Args:
        layer: nn.Linear.
        layer_id, layer_name: stored as attributes, as in the reference.

    Attributes:
        scaler_row: [C] fp32, the sum over tokens of x_j^2 divided by nsamples, accumulated in fp32.
        nsamples: number of sequences seen; a 2-D input counts as one.
        layer, dev, rows, columns: the layer, the device and the shape of its weight.

    Raises:
        UserError: the layer is not linear, or its weight is quantised or parametrised.
    """

    def __init__(self, layer: nn.Linear, layer_id: int = 0, layer_name: str = "none"):
        named = isinstance(layer_name, str) and layer_name != "none"
        check_linear(layer_name if named else "layer", layer)
        self.layer, self.layer_id, self.layer_name = layer, layer_id, layer_name
        self.dev = layer.weight.device
        self.rows, self.columns = layer.weight.shape
        self.scaler_row = torch.zeros(self.columns, dtype=torch.float32, device=self.dev)
        self.nsamples = 0

    def add_batch(self, inp: Tensor, out: Tensor | None) -> None:
        """Add one batch.

        Args:
            inp: [B, L, C] or [L, C] input of the layer, floating, without padding. A batch of no sequences adds
                nothing.
            out: not used.

        Raises:
            UserError: inp is no such tensor.
        """
        dense = isinstance(inp, Tensor) and inp.layout == torch.strided and not inp.is_nested
        if not dense or inp.dim() not in (2, 3) or inp.shape[-1] != self.columns or not inp.is_floating_point():
            got = f"{list(inp.shape)} {inp.dtype}" if dense else type(inp).__name__
            raise UserError(f"inp must be a floating tensor [B, L, {self.columns}] or [L, {self.columns}], got {got}")
        if inp.device != self.dev:
            raise UserError(f"inp must be on {self.dev} like the layer, got {inp.device}")
        batch = 1 if inp.dim() == 2 else inp.shape[0]
        if not batch:
            return
        norm = torch.linalg.vector_norm(inp.detach().reshape(-1, self.columns).float(), dim=0)
        self.scaler_row *= self.nsamples / (self.nsamples + batch)
        self.nsamples += batch
        self.scaler_row += norm.square() / self.nsamples


def wanda_mask(
    weight: Tensor, scaler_row: Tensor, sparsity_ratio: float = 0.5, prune_n: int = 0, prune_m: int = 0
) -> Tensor:
    """Select the weights with the lowest |W_ij| * sqrt(scaler_row_j), with the bits of the reference's W_mask.

    Args:
        weight: [R, C] bf16|fp16|fp32, finite.
        scaler_row: [C] fp32, from WrappedGPT.
        sparsity_ratio: for unstructured pruning: each row loses int(C * sparsity_ratio) weights, rounded in binary
            floating point as in the reference.
        prune_n: if > 0, PRUNE prune_n of every prune_m columns and ignore sparsity_ratio. A last, shorter group loses
            prune_n too. 2:4 also means keep 2 of 4, but 1:4 means keep 3 of 4.
        prune_m: columns in a group.

    Returns:
        [R, C] bool, True = REMOVED.

    Raises:
        UserError: the ratio is outside [0, 1], or the pattern is impossible or does not fit the columns.
        ValueError: a shape, dtype or device does not fit, or a value is not finite.

    Tie rule: among equal scores the lowest column is removed first. The reference's unstructured sort is stable and
    does the same. Its n:m selection is a topk, which may remove any of several equal scores at the cut. Without such
    ties the masks are equal; with them the counts are equal.
    """
    masks = _masks("wanda_mask", weight, _parts(weight, scaler_row, sparsity_ratio, prune_n, prune_m))
    return (masks[0] if len(masks) == 1 else torch.cat(masks, dim=1)).logical_not_()


def wanda_prune_(
    weight: Tensor, scaler_row: Tensor, sparsity_ratio: float = 0.5, prune_n: int = 0, prune_m: int = 0
) -> None:
    """Set the weights that wanda_mask() selects to zero, in place.

    Arguments, errors and tie rule are those of wanda_mask(). After an error the weight has not changed.
    """
    parts = _parts(weight, scaler_row, sparsity_ratio, prune_n, prune_m)
    if len(parts) > 1:
        _masks("wanda_prune_", weight, parts)  # a value refused in the last part must not leave the first one pruned
    for part, scale, keep, m in parts:
        if m is None:
            fk.row_topk_prune_(part, scale, keep)
        else:
            fk.nm_prune_(part, scale, keep, m)


def _masks(op: str, weight: Tensor, parts: list[tuple[Tensor, Tensor, int, int | None]]) -> list[Tensor]:
    """The mask of each part, True = kept.

    Raises:
        ValueError: a value of any part is not finite.
    """
    bad = torch.zeros(1, dtype=torch.int32, device=weight.device)
    masks = [
        fk.row_topk_mask(part, scale, keep, bad=bad) if m is None else fk.nm_mask(part, scale, keep, m, bad=bad)
        for part, scale, keep, m in parts
    ]
    if int(bad):
        raise ValueError(fk.bad_message(op, int(bad)))
    return masks


def _parts(
    weight: Tensor, scaler_row: Tensor, sparsity_ratio: float, prune_n: int, prune_m: int
) -> list[tuple[Tensor, Tensor, int, int | None]]:
    """Split the columns into parts (weight, scale, number kept, m): kept of m columns, or of the row if m is None."""
    for name, tensor, dims in (("weight", weight, 2), ("scaler_row", scaler_row, 1)):
        dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_nested
        if dense and tensor.is_meta:
            raise UserError(f"{name} is on the meta device and holds no numbers; give it on a real device")
        if not dense or tensor.dim() != dims:
            got = list(tensor.shape) if dense else type(tensor).__name__
            raise UserError(f"{name} must be a dense tensor {'[R, C]' if dims == 2 else '[C]'}, got {got}")
    cols = weight.shape[1]
    if scaler_row.shape != (cols,):
        raise UserError(f"scaler_row must be [C]=[{cols}], got {list(scaler_row.shape)}")
    if scaler_row.dtype != torch.float32:
        raise UserError(f"scaler_row must be float32, got {scaler_row.dtype}")
    scale, prune_n = scaler_row.sqrt(), count_of("prune_n", prune_n)
    if prune_n == 0:
        if not 0 <= number_of("sparsity_ratio", sparsity_ratio) <= 1:
            raise UserError(f"sparsity_ratio must be in [0, 1], got {show(sparsity_ratio)}")
        return [(weight, scale, cols - int(cols * sparsity_ratio), None)]
    keep, tail = kept_of(prune_n, prune_m), cols % prune_m
    if 0 < tail < prune_n:
        raise UserError(f"{cols} columns leave a last group of {tail}, too short to prune {prune_n} of {prune_m}")
    whole = cols - tail
    parts = [(weight[:, :whole], scale[:whole], keep, prune_m)] if whole else []
    return parts + ([(weight[:, whole:], scale[whole:], tail - prune_n, None)] if tail else [])
