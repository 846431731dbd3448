"""Progress of long work: which stage of how many, what is left of it, and about how long that takes.

A terminal gets bars. Anything else, such as a pipe or a log file, gets a plain line now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from .terminal import is_terminal, say

LINE_SECONDS = 30  # between two lines of progress where there is no terminal


class _Plan:
    """The titles of all stages, the position of the current one (-1 before the first), and when the plan began."""

    def __init__(self, titles: Sequence[str]):
        self.titles, self.position, self.start = list(titles), -1, time.monotonic()


_plan: ContextVar[_Plan | None] = ContextVar("plan", default=None)
_last_line = 0.0  # when a line was written, on the monotonic clock


@contextmanager
def planned(titles: Sequence[str]) -> Iterator[None]:
    """Inside the block, begin_stage() announces these stages. If a block around this one has a plan, that plan stays.

    Args:
        titles: of the stages, in order.
    """
    token = _plan.set(_plan.get() or _Plan(titles))
    try:
        yield
    finally:
        _plan.reset(token)


def begin_stage(title: str, *, kept: bool = False) -> None:
    """Writes a line such as "[1:20] stage 3 of 7: calibrate"; nothing if no plan has the stage.

    Args:
        title: of the stage. The current stage is not announced again.
        kept: whether an interrupted run has already finished it.
    """
    plan = _plan.get()
    if plan is None or (plan.position >= 0 and title == plan.titles[plan.position]):
        return
    later = plan.titles[plan.position + 1 :]
    if title not in later:
        return
    plan.position += 1 + later.index(title)
    note = " (kept from the interrupted run)" if kept else ""
    _write(f"[{_clock(time.monotonic() - plan.start)}] stage {plan.position + 1} of {len(plan.titles)}: {title}{note}")


def progress_bar(
    iterable: Iterable | None = None,
    *,
    label: str | None,
    unit: str,
    total: int | None = None,
    initial: int = 0,
) -> Any:
    """A progress bar on a terminal, else something with the same methods that writes a line now and then.

    Args:
        iterable: yields the items one by one; None: call update().
        label: the name of the work; None shows nothing.
        unit: what is counted, in the plural.
        total: number of items; None: as many as the iterable has.
        initial: number of items that are done already.

    Returns:
        A context manager, iterable if an iterable is given, with `n` (items done) and `update(count)`.
    """
    if total is None:
        total = len(iterable)  # type: ignore[arg-type]
    if label is None or not is_terminal(sys.stderr):
        return _Lines(iterable, label, unit, total, initial)
    from tqdm import tqdm

    settings = {"total": total, "initial": initial, "unit_scale": total >= 100_000}
    return tqdm(iterable, desc=label, unit=f" {unit}", leave=False, dynamic_ncols=True, **settings)


class _Lines:
    """See progress_bar()."""

    def __init__(self, iterable: Iterable | None, label: str | None, unit: str, total: int, initial: int):
        self.n = initial
        self._iterable, self._label, self._unit, self._total, self._initial = iterable, label, unit, total, initial
        self._start = time.monotonic()

    def __iter__(self) -> Iterator:
        for item in self._iterable or ():
            yield item
            self.update(1)

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_error) -> None:
        pass

    def update(self, count: int = 1) -> None:
        self.n += count
        now = time.monotonic()
        if self._label is None or self.n >= self._total or now - max(_last_line, self._start) < LINE_SECONDS:
            return
        done, plan = self.n - self._initial, _plan.get()
        left = f", about {_clock((now - self._start) / done * (self._total - self.n))} left" if done > 0 else ""
        clock = "" if plan is None else f"[{_clock(now - plan.start)}]   "
        _write(f"{clock}{self._label}: {self.n} of {self._total} {self._unit}{left}")


def _write(line: str) -> None:
    global _last_line
    _last_line = time.monotonic()
    say(line)


def _clock(seconds: float) -> str:
    """Seconds as 1:05, or 2:01:05 from an hour on."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
