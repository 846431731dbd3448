"""Inputs of decoder blocks that wait in RAM for the backward pass."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .memory import fits_ram


class Copies(Protocol):
    """Copies of tensors to another place, and back."""

    def away(self, tensor: Tensor) -> Tensor: ...

    def back(self, tensor: Tensor) -> Tensor: ...


class RamCopies:
    """Copies between a GPU and pinned RAM, on a stream of their own, beside the computation.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)

    def away(self, tensor: Tensor) -> Tensor:
        """A copy in pinned RAM, whose memory torch uses again only after all copies from and to it have ended."""
        kept = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which computes the tensor
        with torch.cuda.stream(self._stream):
            kept.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not used again before the copy ends
        return kept

    def back(self, tensor: Tensor) -> Tensor:
        """A copy on the GPU of what away() returned."""
        with torch.cuda.stream(self._stream):  # the copy to RAM was made on it, too
            loaded = tensor.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        loaded.record_stream(computing)  # its memory is not used again before the computation ends
        return loaded


def kept_away(hidden: Tensor, copies: Copies) -> saved_tensors_hooks:
    """Around torch's checkpoint() of a decoder block: what it saves of the input `hidden` is a copy elsewhere.

    For 13B, 8,192 tokens take 84 MB of each block, which is 3 GB of GPU memory. Inputs that do not fit the RAM stay,
    and so do the other arguments of the block, because all blocks share them.
    """

    address = hidden.data_ptr()  # the hooks live as long as what they pack, and would keep `hidden` itself

    def pack(saved: Tensor) -> tuple[Tensor, bool]:
        moves = saved.data_ptr() == address and fits_ram(saved.nbytes)
        return (copies.away(saved) if moves else saved), moves

    def unpack(packed: tuple[Tensor, bool]) -> Tensor:
        kept, moved = packed
        return copies.back(kept) if moved else kept

    return saved_tensors_hooks(pack, unpack)
