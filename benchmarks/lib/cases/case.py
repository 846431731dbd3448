"""One thing to time, and the random inputs that the cases share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BF16 = torch.bfloat16
ROTATE_BYTES = {"cuda": 400 << 20, "cpu": 64 << 20}


@dataclass
class Case:
    """One op on rotating buffers.

    Attributes:
        ours: the op, one call for each buffer.
        naive: the same work in plain torch, one call for each buffer.
        check: raises AssertionError unless both give the same result. A benchmark calls it before it times anything.
        bytes_moved: bytes that one call must read and write; None if memory does not bound the work.
        reset: restores what the calls change; None if they change nothing.
        product: the matrix product that bounds the work, as torch computes it; None if no product does.
        naive_scale: factor on the naive time, where the naive calls do only a part of the work.
        in_a_call: how many times a call of `ours` and of `naive` does the work.
    """

    ours: list[Callable]
    naive: list[Callable]
    check: Callable[[], None]
    bytes_moved: int | None
    reset: Callable | None = None
    product: Callable | None = None
    naive_scale: float = 1.0
    in_a_call: int = 1


def buffer_count(buffer_bytes: int, device: str) -> int:
    """How many buffers of this size together exceed the caches."""
    return max(2, ROTATE_BYTES[device] // buffer_bytes + 1)


def recorded(calls: list[Callable]) -> Callable:
    """All calls as one CUDA graph: its replay costs the host little."""
    calls[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def random_weight(rows: int, cols: int, device: str, dtype=BF16) -> Tensor:
    return (torch.randn(rows, cols, device=device) * 0.02).to(dtype)


def random_scale(cols: int, device: str) -> Tensor:
    return torch.randn(cols, device=device).exp() + 0.1


def random_keep(rows: int, cols: int, device: str) -> Tensor:
    return torch.randint(cols // 4, 3 * cols // 4, (rows,), device=device)


def same(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual, expected), f"{int((actual != expected).sum())} of {actual.numel()} entries differ"
