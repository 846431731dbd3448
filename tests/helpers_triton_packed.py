"""Checks of the Triton kernels for packed weights, for test_triton.py: interpreted, or on a GPU."""

from __future__ import annotations

import torch
from helpers_triton_obs import BF16, DEVICE, FP16, FP32, ours

import fwanda_kernels as fk
from fwanda_kernels.testing import make_weight

EPS = {
    BF16: 2**-8 if DEVICE == "cuda" else 2**-7,
    FP16: 2**-11,
    FP32: 2**-20,
}  # interpreted, bf16 is not rounded but cut
SHAPES = ((1, 1), (17, 300))
MASKS = ("half", "none", "all", "few", "2:4", "rows differ", "columns differ", "blocks", "lanes differ")


def make_mask(kind: str, rows: int, cols: int) -> torch.Tensor:
    draw = torch.rand(rows, cols, generator=torch.Generator().manual_seed(rows + cols))
    place = torch.arange(cols).expand(rows, cols)
    return {
        "half": draw < 0.5,
        "none": draw < 0,
        "all": draw >= 0,
        "few": draw < 0.1,
        "2:4": place % 4 < 2,
        "rows differ": draw < torch.linspace(0, 1, rows)[:, None],
        "columns differ": place % 7 == 0,
        "blocks": (place < cols // 2) | (torch.arange(rows) % 3 == 0)[:, None],
        "lanes differ": place % 32 < 8,
    }[kind].to(DEVICE)


def check_unpack(dtype) -> None:
    for kind in MASKS:
        for shape in SHAPES:
            weight, mask = make_weight(*shape, dtype, device=DEVICE), make_mask(kind, *shape)
            if weight.numel() > 8:
                weight.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40]).to(dtype)
            dense = ours.unpack_weight(fk.pack_weight(weight, mask), *shape, dtype)
            bits = torch.int16 if dtype.itemsize == 2 else torch.int32
            assert torch.equal(dense.view(bits), weight.view(bits).masked_fill(~mask, 0)), (kind, shape)


def check_linear(dtype, tokens: int) -> None:
    """Near fp64, and twice the same; a removed NaN does not count."""
    for kind in ("half", "all", "blocks", "lanes differ"):
        for shape in SHAPES:
            weight, mask = make_weight(*shape, dtype, device=DEVICE), make_mask(kind, *shape)
            kept = weight.double().masked_fill(~mask, 0)
            weight[~mask] = float("nan")
            packed, wide = fk.pack_weight(weight, mask), make_weight(tokens, 2 * shape[1], dtype, device=DEVICE)
            x, bias = wide[:, : shape[1]], make_weight(1, shape[0], dtype, seed=9, device=DEVICE)[0]
            found = ours.packed_linear(x, packed, bias, *shape)
            size = x.double().abs() @ kept.abs().T + bias.double().abs()
            error = (found.double() - (x.double() @ kept.T + bias.double())).abs()
            assert (error <= EPS[dtype] * size + 1e-30).all(), (kind, shape)
            assert torch.equal(found, ours.packed_linear(x.contiguous(), packed, bias, *shape))


def check_many_tokens() -> None:
    weight, mask, x = make_weight(40, 100, BF16, device=DEVICE), make_mask("half", 40, 100), torch.ones(17, 100)
    x = x.to(BF16).to(DEVICE)
    found = ours.packed_linear(x, fk.pack_weight(weight, mask), None, 40, 100)
    torch.testing.assert_close(found, x @ weight.masked_fill(~mask, 0).T, rtol=2**-7, atol=1e-2)


CASES = {f"unpack-{str(dtype)[6:]}": (check_unpack, dtype) for dtype in (BF16, FP32)}
CASES |= {f"linear-{str(dtype)[6:]}-{n}": (check_linear, dtype, n) for dtype, n in ((BF16, 1), (FP16, 5), (FP32, 16))}
CASES |= {"linear-many-tokens": (check_many_tokens,)}
