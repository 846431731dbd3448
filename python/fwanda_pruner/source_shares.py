"""Names of texts, and the shares that they have in a calibration: SOURCE[:SHARE]."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from .errors import UserError, show

OWN_TEXT = "self"  # the source that the model writes itself


@dataclass(frozen=True)
class SourceShare:
    """One source of a calibration.

    Attributes:
        name: a text that load_documents() reads, or OWN_TEXT.
        share: the source gets the part share / (sum of all shares) of the windows.
    """

    name: str
    share: Fraction = Fraction(1)


def parse_sources(texts: Sequence[str]) -> tuple[SourceShare, ...]:
    """Reads SOURCE[:SHARE], for example "c4:3" or "self". A source without a share has the share 1.

    Raises:
        UserError: a share is not a positive number, or a source is empty or given twice.
    """
    sources = tuple(_parse(text) for text in texts)
    check_names([source.name for source in sources], "--calibration")
    return sources


def check_names(names: Sequence[str], flag: str) -> None:
    """Refuses names that are empty or given twice; two paths of one file are the same name.

    Raises:
        UserError: naming the flag.
    """
    seen = set()
    for name in names:
        if not name.strip():
            raise UserError(f"{flag} has an empty name; give the name of a text or a file")
        key = _text_of(name)
        if key in seen:
            raise UserError(f"{flag} names {name:.80} twice; give each text once")
        seen.add(key)


def divide(total: int, shares: Sequence[Fraction | int]) -> list[int]:
    """Whole numbers in proportion to the shares that add up to `total`: the largest remainders get what is left over.

    Of equal remainders the first goes first.
    """
    exact = [Fraction(total * share) / sum(shares) for share in shares]
    counts = [int(number) for number in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def named_as(names: Sequence[str], sources: Sequence[SourceShare]) -> tuple[str, ...]:
    """The names, where one that is another path of a source's file becomes the name of that source."""
    known = {_text_of(source.name): source.name for source in sources}
    return tuple(known.get(_text_of(name), name) for name in names)


def counts_of(sources: Sequence[SourceShare], total: int) -> list[int]:
    """The number of windows of each source, of `total` windows of all.

    Raises:
        UserError: a source would get none.
    """
    counts = divide(total, [source.share for source in sources])
    for source, count in zip(sources, counts, strict=True):
        if count == 0:
            raise UserError(
                f"--calibration {source.name:.80} gets none of {total} windows by its share; use a larger "
                f"--nsamples or a larger share"
            )
    return counts


def interleaved(counts: Sequence[int]) -> list[int]:
    """The source of each window, in an order that spreads the windows of every source evenly: [2, 1] -> [0, 1, 0]."""
    places = [((i + 0.5) / count, source) for source, count in enumerate(counts) for i in range(count)]
    return [source for _, source in sorted(places)]


def _text_of(name: str) -> str:
    """What is the same for all names of one text: the path of a file, links followed."""
    return os.path.realpath(name) if "\0" not in name and os.path.isfile(name) else name


def _parse(text: str) -> SourceShare:
    name, colon, share = text.rpartition(":")
    if not colon or ("\0" not in text and os.path.exists(text)):
        return SourceShare(text)
    try:  # limits the length, so that the exact fraction stays small
        value = Fraction(share) if re.fullmatch(r"[-+0-9./]{1,20}(e[-+]?[0-9]{1,3})?", share) else Fraction(0)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if not 0 < value <= 10**9:
        raise UserError(
            f"--calibration {show(text)}: the share after the colon must be a positive number, got {show(share)}"
        )
    return SourceShare(name, value)
