"""The backends of this machine, as text."""

from __future__ import annotations

import platform

import torch

from ._dispatch import backends, explain, forced_backend


def describe() -> str:
    """The backend that serves each op on this machine, and why others do not, as text.

    Ops that the same backends serve share a paragraph.

    Raises:
        ValueError: FWANDA_BACKEND names no backend.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    lines = [f"torch {torch.__version__}, Python {platform.python_version()}, {device}"]
    if forced_backend():
        lines.append(f"forced: {forced_backend()}")
    groups: dict[tuple, list[str]] = {}
    for name in backends():
        groups.setdefault(tuple(_device_lines(name)), []).append(name)
    for about, names in groups.items():
        lines += ["", ", ".join(names), *about]
    return "\n".join(lines)


def _device_lines(name: str) -> list[str]:
    lines = []
    for device, table in explain(name).items():
        if len(set(table.values())) == 1:
            lines.append(f"  {device:5} {next(iter(table.values()))}")
        else:
            lines += [f"  {device:5} {backend:10} {status}" for backend, status in table.items()]
    return lines
