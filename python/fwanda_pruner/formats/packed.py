"""The packed format: a Hugging Face folder that stores each pruned matrix as one bit per weight and the kept values.

docs/packed.md has the layout. `load` gives a model that computes with the packed weights; model.load.load_model() reads
such a folder as a dense model.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fwanda_kernels import check_packed, unpack_weight

from ..errors import UserError, one_line
from ..model.load import load_packed
from ..model.pack import packed_meanwhile
from ..model.packed import EXPERT, expert_key
from ..model.packed_quantizer import named_as
from . import dense
from .audit import Part, WrongZeros, ZeroCount, stored_tensors

load = load_packed
model_bytes = dense.model_bytes  # an upper bound: how much is packed shows only after pruning


def write(folder: Path, model, tokenizer) -> None:
    """Write a pruned model into a folder; the model stays dense. A model that is packed is written as it is.

    Args:
        folder: an existing folder.
        model: a Hugging Face model.
        tokenizer: None writes none.

    Raises:
        UserError: as dense.write(), or no matrix is sparse enough to be packed.
        OSError, safetensors.SafetensorError: the file system refuses; see files.user_errors().
    """
    with packed_meanwhile(model):
        dense.write(folder, model, tokenizer)


def count_zeros(
    folder: str | Path, names: Sequence[str], *, model=None, slices: Mapping[str, Part] | None = None
) -> dict[str, ZeroCount]:
    """Count the zeros of matrices in the files of a folder; arguments, result and errors as dense.count_zeros().

    Raises:
        UserError: also if a packed matrix is broken or altered.
    """
    files, slices, counts = stored_tensors(folder), slices or {}, {}
    keys = {name: _key(name, slices.get(name)) for name in names}
    renamed = [name for name in names if keys[name] not in files] if model is not None else []
    tags = {keys[name]: dense.tag_of(number) for number, name in enumerate(renamed)}
    if tags:
        with named_as("packed", model):
            for key, tag in dense.save_tags(model, tags, folder).items():
                keys[renamed[int(tag.max())]] = key
    for name, key in keys.items():
        tensor = _read(files[key], key) if key in files else None
        if tensor is not None and tensor.dtype == torch.uint8:
            counts[name] = _count(key, tensor)
    rest = [name for name in names if name not in counts]
    found = dense.count_zeros(folder, rest, model=model, slices=slices) if rest else {}
    return {name: (counts | found)[name] for name in names if name in counts or name in found}


def verify(
    folder: str | Path, expected: Mapping[str, ZeroCount], *, model=None, slices: Mapping[str, Part] | None = None
) -> list[str]:
    """Compare the zeros in the files with the expected ones; arguments, result and errors as dense.verify().

    Packed experts that the files hold under other names are checked against their hashes.
    """
    counts = count_zeros(folder, list(expected), model=model, slices=slices)
    for name, count in counts.items():
        if count != expected[name]:
            raise WrongZeros(name, count, expected[name])
    not_counted = [name for name in expected if name not in counts]
    for key, file in stored_tensors(folder).items() if not_counted else ():
        if EXPERT.fullmatch(key):
            _count(key, _read(file, key))
    return not_counted


def _key(name: str, part: Part | None) -> str:
    """Name of a packed matrix in the state dict of its model."""
    if part is None:
        return f"{name}.weight"
    path, _, parameter = part.tensor.rpartition(".")
    return f"{path}.{expert_key(parameter, part.index)}"


def _read(file: Path, key: str) -> Tensor:
    try:
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read: {one_line(error)}") from error


def _count(key: str, packed: Tensor) -> ZeroCount:
    try:
        weight = unpack_weight(packed, check_packed(packed))
    except ValueError as error:
        raise UserError(f"{key}: {one_line(error)}; write the packed folder again") from error
    return ZeroCount(weight.numel() - int(torch.count_nonzero(weight)), weight.numel())
