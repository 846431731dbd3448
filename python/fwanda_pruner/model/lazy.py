"""Tensors that are computed when they are written to a file, so that a converted model is never whole in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class LazyTensor(Tensor):
    """Stands for a tensor of a known shape until somebody computes with it, or asks for a contiguous copy.

    `save_pretrained()` of transformers makes each tensor contiguous right before it writes the file that holds it, and
    drops it afterwards. Any other operation computes the tensor as well.

    Args:
        make: computes the tensor. It is called anew each time.
        shape, dtype: of what it returns.
    """

    make: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, make: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype):
        lazy = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device="meta")
        lazy.make = make
        return lazy

    def __init__(self, *_args):
        super().__init__()

    def contiguous(self, *_args, **_kwargs) -> Tensor:
        """The tensor that it stands for."""
        return self.make().contiguous()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].make, tuple(args[0].shape), args[0].dtype)
        args, kwargs = tree_map_only(cls, lambda lazy: lazy.make(), (args, kwargs or {}))
        return func(*args, **kwargs)
