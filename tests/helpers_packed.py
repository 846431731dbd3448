"""Masks that are hard for the packed format."""

import torch


def make_mask(kind: str, rows: int, cols: int, device: str = "cpu") -> torch.Tensor:
    """[rows, cols] bool, the same for the same arguments."""
    draw = torch.rand(rows, cols, device=device, generator=torch.Generator(device).manual_seed(rows + cols))
    row, place = torch.arange(rows, device=device)[:, None], torch.arange(cols, device=device)
    return {
        "half": draw < 0.5,
        "none": draw < 0,
        "all": draw >= 0,
        "few": draw < 0.1,
        "most": draw < 0.93,
        "rows differ": draw < torch.linspace(0, 1, rows, device=device)[:, None],
        "columns differ": (place % 7 == 0).expand(rows, cols),
        "blocks": (place < cols // 2).expand(rows, cols) | (row % 3 == 0),
        "lanes differ": (place % 32 < 8).expand(rows, cols),  # more further words than can be moved
    }[kind]
