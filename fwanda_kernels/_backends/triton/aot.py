"""Compile every kernel without a GPU and read what it costs, so that a spill is seen where no GPU is."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import common, obs, packed, removed, select, sparse24, stats, threshold


def compile_kernels(arch: int | str, dtype: str = "bf16") -> dict[str, tuple[int, int]]:
    """Compile all kernels for typical signatures.

    Args:
        arch: compute capability times ten, e.g. 90, or the name of an AMD GPU, e.g. "gfx942".
        dtype: "bf16", "fp16" or "fp32", of weights and activations.

    Returns:
        Name of kernel and signature -> (registers per thread, bytes spilled to local memory per thread, or registers
        on AMD).

    Raises:
        RuntimeError: Triton's cuobjdump is missing.
    """
    return {name: _compile(arch, *case) for name, *case in _cases("*" + dtype, arch)}


def _cases(weight: str, arch: int | str) -> Iterator[tuple]:
    """(name, kernel, types of the arguments in order with 1 for a unit stride, constexprs, options)."""
    strides, major = ["i64", 1], arch // 10 if isinstance(arch, int) else 0
    plain = {"num_warps": 4}
    types = [weight, "*fp32", "*i64", "*i32", "i32", "i32", *strides]
    yield "check", common._check_kernel, types, {"KEEP": True, "BLOCK": 4096}, plain
    constants = {"MASKED": True, "BLOCK_T": stats.BLOCK_T, "BLOCK_C": stats.BLOCK_C}
    types = [weight, "*u8", "*fp32", "i32", "i32", *strides, "i32"]
    yield "sq_sums", stats._sq_sums_kernel, types, constants, {"num_warps": stats.WARPS}
    constants = {"BLOCK_S": stats.MAX_SLABS, "BLOCK_C": stats.FINISH_C}
    yield "add_slabs", stats._add_slabs_kernel, ["*fp32", "*fp32", "i32", "i32", 1], constants, plain
    types, group = ["*fp32", "*i64", "i32"], {"BLOCK_L": 16}
    yield "foreach_add_slabs", stats._foreach_add_slabs_kernel, types, constants | group, plain
    constants = group | {"MASKED": False, "VECTORS": True, "BLOCK_T": stats.BLOCK_T, "BLOCK_C": stats.BLOCK_C}
    types, options = [weight, "*u8", *types], {"num_warps": stats.WARPS}
    yield "foreach_sq_sums", stats._foreach_sq_sums_kernel, types, constants, options
    yield from _obs_cases(weight, strides, major)
    if weight != "*fp32":
        types = [weight, "*fp32", weight, "*i16", "*i32", "i32", "i32", *strides]
        constants, options = {"BLOCK_C": sparse24.STRIP}, {"num_warps": sparse24.STRIP_WARPS}
        yield "compress_24", sparse24._compress_24_kernel, types, constants, options
    yield from _removed_cases(weight, strides, major)
    yield from _packed_cases(weight, major)
    yield from _nm_cases(weight, strides)
    yield from _row_topk_cases(weight, strides, simd=isinstance(arch, int) and arch >= 90)
    yield from _threshold_cases(weight)


def _obs_cases(weight: str, strides: list, major: int) -> Iterator[tuple]:
    for cols in (4096, 11008) if weight != "*fp32" else ():
        tile = obs.gram_tile(major, cols)
        options = {"num_warps": obs.GRAM_WARPS, "num_stages": tile["num_stages"]}
        constants = {"BLOCK_R": obs.GRAM_R, "BLOCK_T": obs.GRAM_T, "BAND": obs.GRAM_BAND}
        constants |= {name: tile[name] for name in ("BLOCK_C", "STRIP")}
        yield f"gram C={cols}", obs._gram_kernel, [weight, "*fp32", *["i32"] * 4], constants, options
    tile = {"ROW_WEIGHT": True, "BLOCK_C": obs.MAX_BLOCK}
    options = {"num_warps": obs.COUNT_WARPS}
    for digit in range(3):
        types = ["*fp32", "*fp32", "*fp32", "*i32", *["i32"] * 5]
        yield f"count digit={digit}", obs._count_kernel, types, tile | {"DIGIT": digit, "BLOCK_R": obs.COUNT_R}, options
    options = {"num_warps": obs.WALK_WARPS}
    for rule, chosen, group in (
        ("sparsity", "*u8", 0),
        ("mask", "*u8", 0),
        ("keep", "*i64", 128),
        ("pattern", "*u8", 4),
    ):
        types = ["*fp32", weight, *["*fp32"] * 4, chosen, "*i32", *["i32"] * 5, "i32", *strides, *strides]
        constants = tile | {"RULE": rule, "GROUP": group, "BLOCK_R": obs.WALK_R}
        yield f"walk {rule}", obs._walk_kernel, types, constants, options


def _removed_cases(weight: str, strides: list, major: int) -> Iterator[tuple]:
    tile, options = {"BLOCK_R": removed.BLOCK_R, "BLOCK_C": removed.BLOCK_C}, {"num_warps": removed.WARPS}
    yield "pack_mask", removed._pack_mask_kernel, ["*u8", "*u8", "i32", "i32", *strides], tile, options
    types = [weight, "*u8", weight, "i32", "i32"]
    yield "masked_weight", removed._masked_weight_kernel, [*types, *strides], tile, options
    if weight != "*fp32":
        tile = removed.product_tile(major)
        options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
        types = [weight, weight, weight, "*u8", "*fp32", "*fp32", *["i32"] * 3, "i64", "i64"]
        for layout, weight_strides in (("", strides), (" transposed", strides[::-1])):
            constants = tile | {"BAND": removed.BAND}
            yield f"removed_sums{layout}", removed._removed_sums_kernel, [*types, *weight_strides], constants, options


def _packed_cases(weight: str, major: int) -> Iterator[tuple]:
    bits, per_word = ("*i32", 1) if weight == "*fp32" else ("*i16", 2)
    types, constants = ["*i32", bits, *["i32"] * 5], {"PER_WORD": per_word, "LANES": packed.UNPACK_LANES}
    options = packed.options_of(packed.UNPACK_LANES, per_word, major)
    yield "unpack_weight", packed._unpack_kernel, types, constants, options
    for cols, groups in ((1024, 1), (4096, 1), (4096, 2)):
        lanes = packed.lanes_of(cols // 256)
        constants = {"BIAS": True, "PER_WORD": per_word, "LANES": lanes, "GROUPS": groups}
        types, options = ["*i32", weight, weight, weight, *["i32"] * 6], packed.options_of(lanes, per_word, major)
        yield f"packed_linear C={cols} groups={groups}", packed._linear_kernel, types, constants, options


def _nm_cases(weight: str, strides: list) -> Iterator[tuple]:
    for prune in (False, True):
        constants = {"ROWS": sparse24.ROWS_24, "BLOCK_C": sparse24.STRIP, "PRUNE": prune}
        types = [weight, "*fp32", weight if prune else "*u8", "*i32", "i32", "i32", *strides, *strides]
        yield f"2:4 prune={prune}", sparse24._24_kernel, types, constants, {"num_warps": sparse24.STRIP_WARPS}
    for n, m, prune in ((1, 4, False), (4, 8, True), (2, 5, True), (8, 16, True)):
        block_r, block_g, m2 = sparse24.tile_of(4096, 4080, m)
        constants = {"M": m, "M2": m2, "BLOCK_R": block_r, "BLOCK_G": block_g, "PRUNE": prune}
        types = [weight, "*fp32", weight if prune else "*u8", "*i32", "i32", "i32", *strides, *strides, "i32"]
        yield f"nm {n}:{m} prune={prune}", sparse24._nm_kernel, types, constants, {"num_warps": sparse24.WARPS}


def _threshold_cases(weight: str) -> Iterator[tuple]:
    plain = {"num_warps": 4}
    types = [weight, "*i64", "i32", "*i32", "*i64", "*i32", "*i32"]
    constants = {"TILE_R": threshold.TILE_R, "BLOCK": threshold.BLOCK, "BLOCK_L": 256}
    yield "sample", threshold._sample_kernel, types, constants, plain
    yield "bracket", threshold._bracket_kernel, ["*i32", "*i32", "i32", "i32", "i32"], {}, {"num_warps": 1}
    types, width = ["*i64", "*i32", "*i32", "*i32", "*i64", "i32"], {"WIDTH": threshold.BINS // threshold.PARTS}
    yield "sum", threshold._sum_kernel, types, width | {"BLOCK": threshold.BLOCK}, plain
    types, constants = ["*i64", "*i64", "*i32", "i64"], width | {"PARTS": threshold.PARTS}
    yield "narrow", threshold._narrow_kernel, types, constants, plain
    constants = {"VECTORS": True, "TILE_R": threshold.TILE_R, "BLOCK_C": threshold.BLOCK_C}
    types, options = [weight, "*i64", "*i32", "*i32"], {"num_warps": threshold.WARPS}
    counts = ["*i32", "*i32", "*i32"]
    yield "count", threshold._count_kernel, [*types, "*i64", *counts, "*i32", "i32"], constants, options
    yield "finish", threshold._finish_kernel, [*types, *counts, "i32"], constants, options


def _row_topk_cases(weight: str, strides: list, simd: bool) -> Iterator[tuple]:
    for cols, prune in ((4096, False), (4096, True), (28672, True)):
        constants = select.parts_of(cols, simd) | {"PRUNE": prune}
        options = {"num_warps": constants.pop("num_warps")}
        types = [weight, "*fp32", "*i64", weight if prune else "*u8", "*i32", "i32", *strides, *strides]
        yield f"row_topk C={cols} prune={prune}", select._row_topk_kernel, types, constants, options
    constants = select.parts_of(11008, simd) | {"VECTORS": True, "BLOCK_L": 256}
    options = {"num_warps": constants.pop("num_warps")}
    types = [weight, "*i64", "*i32", "i32", "i32"]
    yield "foreach_row_topk C=11008", select._foreach_row_topk_kernel, types, constants, options


def _compile(arch: int | str, kernel, types: list, constants: dict, options: dict) -> tuple[int, int]:
    names = kernel.arg_names
    given = dict(zip(names, types, strict=False))
    signature = {n: "constexpr" if n in constants or given[n] == 1 else given[n] for n in names}
    constexprs = constants | {n: 1 for n, kind in given.items() if kind == 1}
    # as at run time: pointers, and sizes and strides that are multiples of 16
    hints = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n] != "constexpr"}
    source = ASTSource(kernel, signature, constexprs, hints)
    options = options | {"enable_fp_fusion": False}
    if isinstance(arch, str):
        assembly = triton.compile(source, target=GPUTarget("hip", arch, 64), options=options).asm["amdgcn"]
        return tuple(int(re.search(rf"\.vgpr_{name}:\s+(\d+)", assembly)[1]) for name in ("count", "spill_count"))
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return _resources(binary.asm["cubin"])


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) that the wheel's cuobjdump reports."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        raise RuntimeError(f"compile_kernels: no cuobjdump at {tool}; reinstall the triton wheel")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])
