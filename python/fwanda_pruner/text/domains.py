"""Windows on which a pruned model is compared with Wanda's masks, and on which an allocation is chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..source_shares import divide

REPORTED = 8  # windows of a domain in the report
_CHOICE = 8  # windows on which an allocation is chosen: at least so many of all domains together,
_CHOICE_OF_EACH = 4  # and at least so many of each


@dataclass(frozen=True)
class Domain:
    """Windows of one text for comparisons.

    Attributes:
        source: name of the text.
        calibrated: whether the calibration reads other windows of it.
        guard: whether --guard names it.
        unread: True if the calibration does not read these windows. False if the text has no others than those that
            the calibration reads; these are then the last of them.
        reported: [S, L] int64 windows for `domains` of the record.
        choice: [S', L] int64 windows on which an allocation is chosen: other ones, unless the text has a single window.
    """

    source: str
    calibrated: bool
    guard: bool
    unread: bool
    reported: Tensor
    choice: Tensor


def choice_windows(domains: int) -> int:
    """The number of windows of each domain on which an allocation is chosen.

    Args:
        domains: the number of domains.
    """
    return max(_CHOICE_OF_EACH, -(-_CHOICE // domains))


def calibration_part(windows: int) -> int:
    """Number of the windows of a text to calibrate on, so that others are left for the report and the choice.

    Args:
        windows: of the text, at least 1.

    Returns:
        At least half of them.
    """
    return max(windows - REPORTED - choice_windows(1), (windows + 1) // 2)


def split_windows(windows: Tensor, choice: int) -> tuple[Tensor, Tensor]:
    """Divides the windows [S, L] of a domain into `reported` and `choice`. A single window serves both.

    Args:
        windows: at least one.
        choice: wanted windows for the choice; at most half of all are taken.
    """
    if len(windows) == 1:
        return windows, windows
    count = min(choice, len(windows) // 2)
    return windows[count : count + REPORTED], windows[:count]


def spread_evenly(labels: Tensor, count: int) -> Tensor:
    """Positions of `count` windows that are spread evenly over the windows of each source.

    Args:
        labels: [S] int64, the source of each window.
        count: at most S.

    Returns:
        [count] int64, ascending. Each source gets its share of them, by largest remainders.
    """
    groups = [torch.nonzero(labels == label).flatten() for label in labels.unique()]
    counts = divide(count, [len(group) for group in groups])
    chosen = [
        group[(torch.arange(n, device="cpu") * len(group) + len(group) // 2) // n]
        for group, n in zip(groups, counts, strict=True)
        if n
    ]
    return torch.cat(chosen).sort().values
