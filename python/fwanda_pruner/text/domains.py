"""Text of several domains: what the loss of a pruned model is compared on, and what an allocation is chosen on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

REPORTED = 8  # windows of a domain in the report
_CHOICE, _LEAST_CHOICE = 8, 4  # windows on which an allocation is chosen: of all domains at least, of each at least


@dataclass(frozen=True)
class Domain:
    """Windows of one text for comparisons.

    Attributes:
        source: name of the text.
        calibrated: whether the calibration reads other windows of it.
        guard: whether --guard names it.
        unread: whether the calibration does not read these windows. Otherwise they are its last ones.
        reported: [S, L] int64 windows for `domains` of the record.
        choice: [S', L] int64 windows on which an allocation is chosen: others, where the text has more than one.
    """

    source: str
    calibrated: bool
    guard: bool
    unread: bool
    reported: Tensor
    choice: Tensor


def choice_windows(domains: int) -> int:
    """Windows of each of so many domains on which an allocation is chosen."""
    return max(_LEAST_CHOICE, -(-_CHOICE // domains))


def split_windows(windows: Tensor, choice: int) -> tuple[Tensor, Tensor]:
    """Windows [S, L] -> those for the report and those for the choice. One window alone serves both."""
    if len(windows) == 1:
        return windows, windows
    count = min(choice, len(windows) // 2)
    return windows[count : count + REPORTED], windows[:count]


def spread_evenly(labels: Tensor, count: int) -> Tensor:
    """Positions of `count` windows, spread evenly over the windows of each label.

    Args:
        labels: [S] int64, the source of each window.
        count: at most S.

    Returns:
        [count] int64, ascending. Each label gets its share of them, by largest remainders.
    """
    groups = [torch.nonzero(labels == label).flatten() for label in labels.unique()]
    exact = [count * len(group) / len(labels) for group in groups]
    counts = [int(number) for number in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: count - sum(counts)]:
        counts[i] += 1
    chosen = [
        group[(torch.arange(n) * len(group) + len(group) // 2) // n]
        for group, n in zip(groups, counts, strict=True)
        if n
    ]
    return torch.cat(chosen).sort().values
