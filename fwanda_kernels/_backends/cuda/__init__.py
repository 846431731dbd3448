"""CUDA kernels of csrc/*.cu for compute capability 9.0 (Hopper) and newer, launched through the driver API.

The module of a family of ops plans its launches; run() queues them. NVRTC compiles a kernel at the first call that
needs it, unless the package (compile.py) or the cache on disk (disk.py) holds its cubin.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from threading import Lock

import torch
from torch import Tensor

from . import compile as compiling
from . import disk
from .driver import Device, Launch, Zero, capability, check_driver, count_devices

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
ITEMSIZE = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4}
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}  # DType of common.cuh
MAX_SIZE = 0x7FFFFFFF  # of a dimension
_origins: dict[tuple[str, str], str] = {}  # loaded module -> where its code comes from
_devices: dict[int, Device] = {}
_lock = Lock()


def serves(tensor: Tensor) -> bool:
    """Whether the card of a tensor has the instructions that the kernels need."""
    return _serves_device(tensor.get_device())


@cache
def _serves_device(index: int) -> bool:
    return 10 * capability(index)[0] >= compiling.OLDEST_ARCH


def dense_rows(matrix: Tensor) -> bool:
    """Whether the card can run the kernels, and the matrix is not empty and has a column stride of 1."""
    return dense_sizes([matrix]) is not None


def dense_sizes(matrices: Sequence[Tensor]) -> list[tuple[int, int, int]] | None:
    """(rows, columns, row stride) of each matrix on one device, or None if dense_rows() is false for one of them."""
    if not serves(matrices[0]):
        return None
    sizes = []
    for matrix in matrices:
        (rows, cols), (row_stride, col_stride) = matrix.shape, matrix.stride()
        if not (0 < rows <= MAX_SIZE and 0 < cols <= MAX_SIZE and (col_stride == 1 or cols == 1)):
            return None
        sizes.append((rows, cols, row_stride))
    return sizes


def aligned(address: int, row_stride: int, cols: int, itemsize: int) -> bool:
    """Whether 16-byte loads fit a matrix: every row begins at a multiple of 16 bytes and is such a multiple long."""
    return not (address | row_stride * itemsize | cols * itemsize) % 16


@cache
def variant(dtype: torch.dtype, in_vectors: bool) -> str:
    """The variant of a module for weights of a dtype."""
    return DTYPES[dtype] if in_vectors else f"{DTYPES[dtype]}-unaligned"


def multiprocessors(tensor: Tensor) -> int:
    """How many the card of a tensor has."""
    return _device(tensor.get_device()).multiprocessors


def shared_bytes(tensor: Tensor) -> int:
    """Bytes of shared memory that a block of the card of a tensor may have."""
    return _device(tensor.get_device()).shared_bytes


def run(like: Tensor, steps: Sequence[Launch | Zero]) -> None:
    """Queue steps on the current stream of a tensor's device.

    The caller keeps alive every tensor whose address is in the steps until this returns. After that, the memory may be
    freed: torch reuses it only behind these steps in the stream.

    Raises:
        ImportError: a kernel cannot be compiled or loaded; nothing was queued.
        RuntimeError: a launch failed.
    """
    index = like.get_device()
    # torch.compile generates this call, too; torch.cuda.current_stream() takes ten times as long
    _device(index).run(steps, torch._C._cuda_getCurrentRawStream(index))


def _device(index: int) -> Device:
    if device := _devices.get(index):
        return device
    with _lock:
        if index not in _devices:  # another thread may have been faster
            _devices[index] = Device(index, find_code)
        return _devices[index]


def find_code(module: tuple[str, str], capability: tuple[int, int]) -> bytes:
    """The cubin of a module for a card: from the package, from the cache, or compiled now.

    Raises:
        ImportError: it cannot be compiled here.
    """
    with _lock:
        try:
            cubin, origin = _find(module, capability)
        except compiling.CompileError as error:
            raise ImportError(str(error)) from error
        _origins[module] = origin
        return cubin.code


def _find(module: tuple[str, str], capability: tuple[int, int]) -> tuple[compiling.Cubin, str]:
    if cubin := compiling.built(*module, capability):
        return cubin, f"built by {cubin.by}"
    nvrtc = compiling.find_nvrtc()
    arch = _arch(nvrtc, capability)
    if cubin := disk.load(*module, arch, nvrtc.name):
        return cubin, f"compiled by {cubin.by} in {cubin.seconds:.1f} s, from the cache"
    cubin = nvrtc.compile(*module, arch)
    reason = disk.store(*module, arch, cubin)
    kept = "cached" if reason is None else f"not cached: {reason}"
    return cubin, f"compiled by {cubin.by} in {cubin.seconds:.1f} s, {kept}"


def _arch(nvrtc: compiling.Nvrtc, capability: tuple[int, int]) -> int:
    if arch := compiling.best_arch(capability, nvrtc.archs):
        return arch
    known = ", ".join(map(str, nvrtc.archs))
    raise compiling.CompileError(f"{nvrtc.name} compiles for sm_{known}, the card is sm_{capability[0]}{capability[1]}")


def about(family: str) -> str:
    """Where the kernels of a family come from, as the end of a line of explain()."""
    loaded = {variant: origin for (name, variant), origin in sorted(_origins.items()) if name == family}
    if loaded:
        return "; ".join(f"{variant}: {origin}" for variant, origin in loaded.items())
    return _source(family, _served_capability())


def _source(family: str, capability: tuple[int, int]) -> str:
    """Where the kernels of a family will come from."""
    variants = list(compiling.FAMILIES[family])
    if all(compiling.built(family, variant, capability) for variant in variants):
        return f"built by {compiling.built(family, variants[0], capability).by}"
    nvrtc = compiling.find_nvrtc()
    arch = _arch(nvrtc, capability)
    kept = sum(disk.load(family, variant, arch, nvrtc.name) is not None for variant in variants)
    return f"{nvrtc.name} compiles them on first use; {kept} of {len(variants)} variants are in the cache"


def _served_capability() -> tuple[int, int]:
    """The compute capability of the first card that the kernels serve.

    Raises:
        ImportError: there is none.
    """
    cards = [capability(index) for index in range(count_devices())]
    for card in cards:
        if 10 * card[0] >= compiling.OLDEST_ARCH:
            return card
    found = ", ".join(f"{major}.{minor}" for major, minor in cards) or "no card"
    raise ImportError(f"needs compute capability 9.0 or newer, got {found}")


def _expect_kernels() -> None:
    """Raise ImportError with the reason if this machine cannot run or get the kernels."""
    check_driver()
    card = _served_capability()
    try:
        _source("stats", card)
    except compiling.CompileError as error:
        raise ImportError(str(error)) from error


_expect_kernels()
