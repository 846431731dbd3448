"""Memory: how much is free, and where tensors that may not fit the GPU are put."""

from __future__ import annotations

import os
import tempfile

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


def fits_ram(needed: int) -> bool:
    """Whether so many bytes are at most half of the free RAM."""
    return needed < _RAM_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
        raise UserError(
            f"the hidden states need {needed / 2**30:.1f} GiB of memory, or of disk in {tempfile.gettempdir()} (TMPDIR "
            f"names another folder): {error.strerror}; or use fewer or shorter --nsamples and --seqlen"
        ) from error
    return flat.view(shape)
