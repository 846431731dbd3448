"""The dense format, with the masks of the pruned model beside it in `masks.safetensors`: one bit per weight."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fwanda_kernels import pack_mask

from ..errors import UserError, one_line, shortened
from ..model.load import load_model
from ..model.packed import expect_dense
from ..model.targets import find_targets
from ..setting_checks import expect_path
from . import dense
from .audit import Part, WrongFiles, WrongZeros, ZeroCount, read_parts, stored_tensors

FILE_NAME = "masks.safetensors"

load = load_model
model_bytes = dense.model_bytes
count_zeros = dense.count_zeros


def write(folder: Path, model, tokenizer) -> None:
    """Write a model as dense.write() does, and its masks. A weight that is not zero counts as kept.

    `masks.safetensors` holds a tensor [R, ceil(C/8)] uint8 for each matrix that can be pruned, under its name; bit
    j % 8 of byte j // 8 is column j, 1 where the weight is kept.

    Raises:
        UserError: as dense.write(), or the model is packed.
    """
    expect_dense(model)
    dense.write(folder, model, tokenizer)
    masks = {target.name: pack_mask(target.weight != 0).cpu() for target in find_targets(model)[0]}
    save_file(masks, folder / FILE_NAME)


def verify(
    folder: str | Path, expected: Mapping[str, ZeroCount], *, model=None, slices: Mapping[str, Part] | None = None
) -> list[str]:
    """Compare the zeros in the files, and in the masks, with the expected ones; arguments and result as dense.verify().

    A mask is also compared with the weights, if the files hold its matrix under its own name.

    Raises:
        WrongFiles, UserError: as dense.verify(); or a mask is missing or differs.
    """
    masks, ones = load_masks(folder), torch.tensor([number.bit_count() for number in range(256)], device="cpu")
    for name, count in expected.items():
        if name not in masks:
            raise UserError(f"{Path(folder, FILE_NAME)} has no mask of {name}; write the folder again")
        found = ZeroCount(count.weights - int(ones[masks[name].long()].sum()), count.weights)
        if found != count:
            raise WrongZeros(f"the mask of {name}", found, count)
    files = stored_tensors(folder)
    parts = {name: (slices or {}).get(name, Part(f"{name}.weight")) for name in expected}
    for name, weight in read_parts(folder, {name: [part] for name, part in parts.items() if part.tensor in files}):
        kept = weight != 0  # Conv1D and some experts store [C, R]
        if not any(torch.equal(masks[name], pack_mask(mask)) for mask in (kept, kept.T.contiguous())):
            raise WrongFiles(f"the mask of {name} is not that of its weights")
    return dense.verify(folder, expected, model=model, slices=slices)


def load_masks(folder: str | Path) -> dict[str, Tensor]:
    """Masks of a folder that write() made: name -> [R, ceil(C/8)] uint8.

    Raises:
        UserError: the folder has no such file, or it cannot be read or holds something else.
    """
    expect_path("folder", folder)
    file = Path(folder, FILE_NAME)
    if not os.path.isfile(file):  # False also for a path that no file system takes
        raise UserError(f"{shortened(str(folder))} holds no {FILE_NAME}; write it by fwanda prune ... --save masks")
    try:
        with safe_open(file, framework="pt") as tensors:
            masks = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{shortened(str(file))}: cannot be read: {one_line(error)}") from error
    for name, mask in masks.items():
        if mask.dtype != torch.uint8 or mask.dim() != 2:
            raise UserError(
                f"{shortened(str(file))}: {name} must be [R, ceil(C/8)] uint8, got {list(mask.shape)} {mask.dtype}; it "
                f"is another file"
            )
    return masks
