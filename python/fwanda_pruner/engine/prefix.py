"""The decoder blocks before the first target, which give the same outputs under all masks."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..model.attributes import replaced


class SharedPrefix:
    """Runs the same windows through the first blocks of a model once, for several passes.

    The first pass over some windows keeps what the last of these blocks returns. In later passes over them none of the
    blocks computes: each returns a copy of what was kept. Holds [S, L, H] for S windows of L tokens.

    Args:
        blocks: the first blocks, whose weights do not change; may be empty.
    """

    def __init__(self, blocks: Sequence[nn.Module]):
        self._blocks = blocks
        self._outputs: dict[tuple[int, int], object] = {}  # first window and number of windows -> output

    @contextmanager
    def over(self, start: int, size: int) -> Iterator[None]:
        """Inside, the windows [start, start + size) run through the model."""
        if not self._blocks:
            yield
        elif (start, size) in self._outputs:
            kept = self._outputs[start, size]
            with replaced("forward", dict.fromkeys(self._blocks, lambda *_args, **_kwargs: _copy(kept))):
                yield
        else:
            self._forget(start, start + size)

            def keep(_module, _args, kwargs, output):
                # through a container, blocks hand more than hidden states to later blocks (e.g. shared keys and values)
                if not any(isinstance(value, (MutableMapping, list)) for value in kwargs.values()):
                    self._outputs[start, size] = _copy(output)

            handle = self._blocks[-1].register_forward_hook(keep, with_kwargs=True)
            try:
                yield
            finally:
                handle.remove()

    def _forget(self, start: int, end: int) -> None:
        """Frees what passes of another size kept of the windows [start, end): the memory ran out since."""
        others = {key: output for key, output in self._outputs.items() if sum(key) <= start or key[0] >= end}
        self._outputs = others


def _copy(output):
    """A block may write to its input."""
    return tree_map_only(Tensor, Tensor.clone, output)
