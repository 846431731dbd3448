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

from . import common, select, sparse24, stats, threshold

_DTYPES = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}
_COLUMNS = (576, 2048, 4096, 8192, 11008, 16384, 28672, 57344)


def compile_kernels(arch: int) -> dict[str, tuple[int, int]]:
    """Compile all kernels for typical signatures.

    Args:
        arch: compute capability times ten, e.g. 90.

    Returns:
        Name of kernel and signature -> (registers per thread, bytes spilled to local memory per thread).

    Raises:
        RuntimeError: a kernel does not compile, or Triton's cuobjdump is missing.
    """
    return {name: _compile(arch, *case) for name, *case in _cases()}


def _cases() -> Iterator[tuple]:
    """(name, kernel, types of the arguments in order, constexprs, num_warps)."""
    strides = ["i64", 1]
    for name, weight in _DTYPES.items():
        yield (
            f"check {name}", common._check_kernel,
            [weight, "*fp32", "*i64", "*i32", "i32", "i32", *strides], {"KEEP": True, "BLOCK": 4096}, 4,
        )  # fmt: skip
        for masked in (False, True):
            constants = {"MASKED": masked, "BLOCK_T": stats.BLOCK_T, "BLOCK_C": stats.BLOCK_C}
            types = [weight, "*u8", "*fp32", "i32", "i32", *strides, "i32"]
            yield f"sq_sums {name} masked={masked}", stats._sq_sums_kernel, types, constants, stats.WARPS
        for prune in (False, True):
            out = weight if prune else "*u8"
            for n, m in ((2, 4), (4, 8), (1, 5), (8, 16)):
                block_r, block_g, m2 = sparse24.tile_of(4096, 4080, m)
                constants = {"M": m, "M2": m2, "BLOCK_R": block_r, "BLOCK_G": block_g, "PRUNE": prune}
                types = [weight, "*fp32", out, "*i32", "i32", "i32", *strides, *strides, "i32"]
                yield f"nm {n}:{m} {name} prune={prune}", sparse24._nm_kernel, types, constants, sparse24.WARPS
            for cols in _COLUMNS:
                a, b, rest, warps = select.parts_of(cols)
                constants = {"A": a, "B": b, "REST": rest, "PRUNE": prune}
                types = [weight, "*fp32", "*i64", out, "*i32", "i32", *strides, *strides]
                yield f"row_topk {name} C={cols} prune={prune}", select._row_topk_kernel, types, constants, warps
        types = [weight, "*fp32", "*fp32", "*i32", "*i64", "*i32", "*i32", *["i32"] * 6, *strides]
        constants = {"TILE_R": threshold.TILE_R, "BLOCK": threshold.BLOCK}
        yield f"sample {name}", threshold._sample_kernel, types, constants, 4
        for final in (False, True):
            types = [weight, "*i64", "*i32", "*i32", "*i64", "*i32", "*i32", "*i32", "i32"]
            constants = {"FINAL": final, "DENSE": True, "TILE_R": threshold.TILE_R, "BLOCK_C": threshold.BLOCK_C}
            yield f"count {name} final={final}", threshold._count_kernel, types, constants, threshold.WARPS
    types = ["*fp32", "*fp32", "i32", "i32", 1]
    yield "add_slabs", stats._add_slabs_kernel, types, {"BLOCK_S": stats.MAX_SLABS, "BLOCK_C": 32}, 4


def _compile(arch: int, kernel, types: list, constants: dict, warps: int) -> tuple[int, int]:
    names = kernel.arg_names
    given = dict(zip(names, types, strict=False))
    signature = {n: "constexpr" if n in constants or given[n] == 1 else given[n] for n in names}
    constexprs = constants | {n: 1 for n, kind in given.items() if kind == 1}
    # as at run time: pointers, and sizes and strides that are multiples of 16
    hints = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n] != "constexpr"}
    source = ASTSource(kernel, signature, constexprs, hints)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "enable_fp_fusion": False})
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
