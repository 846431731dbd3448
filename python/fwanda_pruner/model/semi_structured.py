"""2:4 weights as torch's semi-structured tensors, which the sparse tensor cores of NVIDIA multiply."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.sparse import (
    SparseSemiStructuredTensor,
    SparseSemiStructuredTensorCUSPARSELT,
    SparseSemiStructuredTensorCUTLASS,
)

from fwanda_kernels import compress_24, compress_24_cusparselt

from ..errors import UserError, show
from .arguments import expect_model
from .packed import expect_dense
from .targets import Target, find_targets

_MULTIPLES = {"cusparselt": (16, 16), "cutlass": (32, 64)}  # rows and columns must be multiples of these


def to_semi_structured(model: nn.Module, *, tokens: int = 2048) -> nn.Module:
    """Replace the weights of a 2:4-pruned model by torch's semi-structured tensors, in place, one after the other.

    Use it where passes have many tokens, as in prefill or scoring: with few tokens these products are slower than dense
    ones (see docs/packed.md). It runs on cuSPARSELt where torch has it, else, on compute capability 8.x, on CUTLASS.
    Fused experts and layers that are no nn.Linear stay dense. Save the model first: a converted model cannot be saved.

    Args:
        model: a causal language model pruned with the pattern 2:4, in bf16 or fp16, on a GPU.
        tokens: of a pass, for which cuSPARSELt searches the fastest algorithm, once for each shape.

    Returns:
        The model.

    Raises:
        UserError: a weight is not 2:4, its shape or dtype does not fit, or there is no such GPU; nothing was changed.
    """
    expect_model(model)
    expect_dense(model)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise UserError(f"to_semi_structured: tokens must be a whole number from 1 on, got {show(tokens)}")
    layers = _linear_targets(model)
    _expect_24(layers)
    backend = _backend({target.weight.device for target in layers})
    _expect_shapes(layers, backend)
    algorithms: dict[tuple, int] = {}
    for target in layers:
        weight = target.module.weight.detach()
        converted = as_cutlass(weight) if backend == "cutlass" else as_cusparselt(weight, tokens, algorithms)
        target.module.weight = nn.Parameter(converted, requires_grad=False)
    return model


def as_cutlass(weight: Tensor) -> SparseSemiStructuredTensorCUTLASS:
    """A 2:4 weight [R, C] in the form of CUTLASS, which torch multiplies on compute capability 8.x."""
    values, meta = compress_24(weight, _equal_scores(weight))
    return SparseSemiStructuredTensorCUTLASS(
        weight.shape, packed=values, meta=meta, packed_t=None, meta_t=None, compressed_swizzled_bitmask=None
    )


def as_cusparselt(weight: Tensor, tokens: int, algorithms: dict[tuple, int]) -> SparseSemiStructuredTensorCUSPARSELT:
    """A 2:4 weight [R, C] on a GPU in the form of cuSPARSELt, with the algorithm that is fastest for so many tokens.

    algorithms: (shape, dtype, device) -> what the search has found; what is missing is added.
    """
    packed = compress_24_cusparselt(weight, _equal_scores(weight))
    key = (weight.shape, weight.dtype, weight.device)
    if key not in algorithms:
        padded = -(-tokens // 8) * 8  # torch pads tokens to a multiple of 8
        x = torch.randn(padded, weight.shape[1], dtype=weight.dtype, device=weight.device)
        algorithms[key] = torch._cslt_sparse_mm_search(packed, x.t(), transpose_result=True)
    return SparseSemiStructuredTensorCUSPARSELT(
        weight.shape, packed=packed, meta=None, packed_t=None, meta_t=None, compressed_swizzled_bitmask=None,
        fuse_transpose_cusparselt=True, alg_id_cusparselt=algorithms[key],
    )  # fmt: skip


def _equal_scores(weight: Tensor) -> Tensor:
    return torch.ones(weight.shape[1], dtype=torch.float32, device=weight.device)


def _linear_targets(model: nn.Module) -> list[Target]:
    layers = [target for target in find_targets(model)[0] if target.slice_of is None]
    layers = [target for target in layers if isinstance(target.module, nn.Linear)]
    if not layers:
        raise UserError(f"to_semi_structured: {type(model).__name__} has no nn.Linear in its blocks; it stays dense")
    if isinstance(layers[0].module.weight.detach(), SparseSemiStructuredTensor):
        raise UserError(f"to_semi_structured: the model is converted already ({layers[0].name})")
    return layers


def _expect_24(layers: Iterable[Target]) -> None:
    for target in layers:
        weight = target.weight
        if weight.dtype not in (torch.bfloat16, torch.float16):
            raise UserError(
                f"to_semi_structured: {target.name} is {str(weight.dtype).removeprefix('torch.')}, expected bfloat16 "
                f"or float16; convert the model: model.to(torch.bfloat16)"
            )
        if not bool(torch.isfinite(weight).all()):
            raise UserError(f"to_semi_structured: {target.name} has NaN or inf; repair the model first")
        rows, cols = weight.shape
        kept = (weight[:, : cols // 4 * 4] != 0).view(rows, -1, 4).sum(2)
        if cols % 4 or bool((kept > 2).any()):
            share = float((kept > 2).float().mean()) if kept.numel() else 1.0
            raise UserError(
                f"to_semi_structured: {target.name} is not 2:4: {share:.1%} of its groups of four columns keep more "
                f"than two weights; prune it with --pattern 2:4"
            )


def _backend(devices: set[torch.device]) -> str:
    """The library that multiplies on the devices of the weights."""
    other = next((device for device in devices if device.type != "cuda"), None)
    if other is not None:
        raise UserError(f"to_semi_structured: the model is on {other}, expected a GPU; move it: model.to('cuda')")
    capabilities = {torch.cuda.get_device_capability(device) for device in devices}
    if torch.version.hip is None and min(capabilities) >= (8, 0):
        if torch.backends.cusparselt.is_available():
            return "cusparselt"
        if max(capabilities) < (9, 0):
            return "cutlass"
    found = ", ".join(f"{major}.{minor}" for major, minor in sorted(capabilities))
    raise UserError(
        f"to_semi_structured: torch cannot multiply 2:4 weights here: compute capability {found}, cuSPARSELt "
        f"{'present' if torch.backends.cusparselt.is_available() else 'missing'}; install torch's CUDA build with "
        f"cuSPARSELt, on a GPU from 8.0 on"
    )


def _expect_shapes(layers: Iterable[Target], backend: str) -> None:
    rows, cols = _MULTIPLES[backend]
    for target in layers:
        if target.shape[0] % rows or target.shape[1] % cols:
            raise UserError(
                f"to_semi_structured: {target.name} is {list(target.shape)}, but {backend} needs multiples of {rows} "
                f"rows and {cols} columns; leave this model dense"
            )
