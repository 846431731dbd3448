"""The dense format, with the masks of the pruned model beside it in `masks.safetensors`: one bit per weight."""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fwanda_kernels import pack_mask

from ..errors import UserError, one_line
from ..model.load import load_model
from ..model.targets import find_targets
from . import dense

FILE_NAME = "masks.safetensors"

load = load_model
model_bytes = dense.model_bytes
count_zeros = dense.count_zeros
verify = dense.verify


def write(folder: Path, model, tokenizer) -> None:
    """Write a model as dense.write() does, and its masks. A weight that is not zero counts as kept.

    `masks.safetensors` holds a tensor [R, ceil(C/8)] uint8 for each matrix that can be pruned, under its name; bit
    j % 8 of byte j // 8 is column j, 1 where the weight is kept.
    """
    dense.write(folder, model, tokenizer)
    masks = {target.name: pack_mask(target.weight != 0).cpu() for target in find_targets(model)[0]}
    save_file(masks, folder / FILE_NAME)


def load_masks(folder: str | Path) -> dict[str, Tensor]:
    """Masks of a folder that write() made: name -> [R, ceil(C/8)] uint8.

    Raises:
        UserError: the folder has no such file, or it cannot be read.
    """
    file = Path(folder, FILE_NAME)
    if not file.is_file():
        raise UserError(f"{folder} holds no {FILE_NAME}; write it by fwanda prune ... --save masks")
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read: {one_line(error)}") from error
