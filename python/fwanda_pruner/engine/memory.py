"""Memory: how much is free, and where tensors that may not fit the GPU are put."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError

_GPU_SHARE, _RAM_SHARE = 0.4, 0.5  # of the free memory, for the hidden states of all windows


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still allocate on a CUDA device, including what torch holds in reserve."""
    free, total = torch.cuda.mem_get_info(device)
    limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
    reserved = torch.cuda.memory_reserved(device)
    return min(free, limit - reserved) + reserved - torch.cuda.memory_allocated(device)


def free_ram(root: Path = Path("/")) -> int:
    """Bytes of RAM that this process can still take without swapping: also those that only cache files.

    Args:
        root: of the folders /proc and /sys, where the kernel tells this.
    """
    free = _kernel_values(root / "proc/meminfo").get("MemAvailable:")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if free is None else free * 1024
    container = root / "sys/fs/cgroup"  # version 2
    with suppress(OSError, ValueError):  # no container, or one without a limit
        limit, used = (int((container / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used + _kernel_values(container / "memory.stat").get("inactive_file", 0))
    return max(0, free)


def _kernel_values(file: Path) -> dict[str, int]:
    """Name -> number, of lines `name number ...`; empty if the file is missing."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines}


def fits_ram(needed: int, share: float = _RAM_SHARE) -> bool:
    """Whether so many bytes are less than a share of the free RAM."""
    return needed < share * free_ram()


def pinned(tensor: Tensor) -> Tensor:
    """The tensor in pinned RAM, from which a GPU copies beside its computation: itself, or a copy.

    The copy takes as many bytes as the tensor. torch's own pinned memory takes the next power of two: for a matrix of
    LLaMA-2-13B, [13824, 5120] bf16, 256 MiB instead of 135.

    Args:
        tensor: on the CPU or on a GPU.

    Raises:
        UserError: the driver refuses.
    """
    if tensor.is_pinned() or not tensor.nbytes:
        return tensor
    memory = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    copy = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    cudart, address = torch.cuda.cudart(), copy.data_ptr()
    if code := int(cudart.cudaHostRegister(address, tensor.nbytes, 0)):
        raise UserError(
            f"the GPU cannot pin RAM (CUDA error {code}); raise the memory limit of this machine or container"
        )
    weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False  # runs before the memory is freed
    return copy.copy_(tensor)


def allocate_large(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An uninitialised tensor of the dtype of `like`: on its device, else in RAM, else in an unnamed file.

    Raises:
        UserError: the disk has no room either.
    """
    count = torch.Size(shape).numel()
    needed = count * like.element_size()
    if like.device.type == "cuda" and needed < _GPU_SHARE * free_memory(like.device):
        return like.new_empty(shape)
    if fits_ram(needed):
        return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=like.device.type == "cuda")
    try:
        with tempfile.NamedTemporaryFile(prefix="fwanda-") as file:  # the mapping outlives the file's name
            os.posix_fallocate(file.fileno(), 0, needed)
            flat = torch.from_file(file.name, shared=True, size=count, dtype=like.dtype)
    except OSError as error:
        folder = tempfile.tempdir or "the temporary folder"  # None: Python found none that can be written
        raise UserError(
            f"no room for {needed / 2**30:.1f} GiB of hidden states or pruned weights in RAM, nor on the disk of "
            f"{folder}: {error.strerror}; let TMPDIR name a folder with more room, or use a smaller "
            f"--nsamples or --seqlen"
        ) from error
    return flat.view(shape)
