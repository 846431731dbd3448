"""What transformers need not ask about windows that are single sequences."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from transformers import masking_utils

_find = getattr(masking_utils, "find_packed_sequence_indices", None)  # a version without it does not ask
_lock = threading.Lock()
_inside: list[int] = []  # threads, once for each block that they are in


@contextmanager
def single_sequences() -> Iterator[None]:
    """Within the block, transformers takes every window of this thread for one sequence, as ours are.

    Else it may look at the positions for several in one window. The answer decides what the host does next, so that the
    host waits, at the start of every pass, until a GPU has done all that it was given before.
    """
    thread = threading.get_ident()
    with _lock:
        _inside.append(thread)
        masking_utils.find_packed_sequence_indices = _find_elsewhere
    try:
        yield
    finally:
        with _lock:
            _inside.remove(thread)
            if not _inside:
                masking_utils.find_packed_sequence_indices = _find


def _find_elsewhere(position_ids: Tensor) -> Tensor | None:
    return None if threading.get_ident() in _inside else _find(position_ids)
