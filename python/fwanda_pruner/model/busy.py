"""Whether other programs keep the CPUs of this machine busy."""

import os

import torch

from ..notes import warn


def busy_note() -> str | None:
    """What to do when more programs want to run than there are CPUs; None if the machine is not busy.

    Threads of one operation wait for each other, so with several of them each operation lasts as long as its slowest
    thread. On two busy cores, SparseGPT took three times as long with two threads as with one.
    """
    cpus, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]  # mean number of programs that ran in the last minute
    if load <= cpus:
        return None
    return (
        f"other programs keep this machine busy (load {load:.1f} on {cpus} CPUs), so times will be long; "
        f"OMP_NUM_THREADS=1 helps, because several threads wait for each other"
    )


def warn_if_busy() -> None:
    """Warn if the machine is busy and torch uses several threads.

    Warns:
        UserWarning: see busy_note().
    """
    if torch.get_num_threads() > 1 and (note := busy_note()):
        warn(note)
