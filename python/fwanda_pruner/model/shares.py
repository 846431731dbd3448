"""A rank's share of the weights of a block: how it becomes the whole block, and how changes come back to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


@contextmanager
def whole(block: nn.Module) -> Iterator[None]:
    """Inside, a sharded block has its whole weights, on every rank. All ranks must enter; what they write is lost."""
    if not isinstance(block, FSDPModule):
        yield
        return
    block.unshard()
    try:
        yield
    finally:
        block.reshard()


def keep_share_(share: Tensor, weight: Tensor) -> None:
    """Copies the rows of this rank from a whole weight into its share, a DTensor. Other tensors stay as they are."""
    if isinstance(share, DTensor):
        mesh, local = share.device_mesh, own_part(share)
        rows = -(-len(weight) // mesh.size())  # of all ranks but the last ones
        start = rows * mesh.get_local_rank()
        local.copy_(weight[start : start + len(local)])


def own_part(tensor: Tensor) -> Tensor:
    """The share of this rank of a tensor that is divided over the ranks; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
