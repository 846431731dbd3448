"""Stands for the streams of a GPU on a CPU: what runs on a side stream runs as late as the waits of others allow.

So a computation that does not wait for a copy reads NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fwanda_pruner.engine import block_weights, streamed


class Gpu:
    """The device of the blocks. Their tensors lie on the CPU."""

    type = "cuda"


@dataclass(frozen=True)
class Event:
    stream: Stream
    position: int


class Stream:
    """A queue of copies; the computation of the CPU is the stream that never has any.

    Attributes:
        copies: that were queued so far.
        waits: events that this stream waited for.
    """

    def __init__(self, device=None):
        self.copies = self.waits = 0
        self._queue: list[Callable[[], object]] = []

    def add(self, work: Callable[[], object]) -> None:
        self._queue.append(work)
        self.copies += 1

    def record_event(self) -> Event:
        return Event(self, self.copies)

    def wait_event(self, event: Event) -> None:
        self.waits += 1
        if self is COMPUTING:
            event.stream.run_to(event.position)
        elif event.stream is not self:
            self._queue.append(lambda: event.stream.run_to(event.position))
            self.copies += 1

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.run_to(self.copies)

    def run_to(self, position: int) -> None:
        while self._queue and self.copies - len(self._queue) < position:
            self._queue.pop(0)()


COMPUTING = Stream()


def late_streams(monkeypatch) -> type[Gpu]:
    """From now on, streamed engines load their blocks to such a device."""
    gpu, current = Gpu(), [COMPUTING]
    to, copy_, empty_like = Tensor.to, Tensor.copy_, torch.empty_like

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        current.append(chosen)
        try:
            yield
        finally:
            current.pop()

    def late_to(tensor: Tensor, *args, **kwargs) -> Tensor:
        if args[:1] != (gpu,):
            return to(tensor, *args, **kwargs)
        loaded = torch.full_like(tensor, float("nan"))
        current[-1].add(lambda: copy_(loaded, tensor))
        return loaded

    def late_copy_(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking:
            return copy_(tensor, source)
        source = source.detach()
        current[-1].add(lambda: copy_(tensor, source))
        return tensor

    class BlockWeights(block_weights.BlockWeights):
        def __init__(self, blocks, fused, _device, *rest):
            super().__init__(blocks, fused, gpu, *rest)

    def empty(tensor: Tensor, *, pin_memory: bool = False, **kwargs) -> Tensor:
        return empty_like(tensor, **kwargs)

    for place, name, value in (
        (torch.cuda, "Stream", Stream), (torch.cuda, "stream", stream), (torch, "empty_like", empty),
        (torch.cuda, "current_stream", lambda _device: current[-1]), (Tensor, "to", late_to),
        (Tensor, "copy_", late_copy_), (Tensor, "record_stream", lambda _tensor, _stream: None),
        (block_weights, "pinned", lambda tensor: tensor), (streamed, "BlockWeights", BlockWeights),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, value)
    return gpu
