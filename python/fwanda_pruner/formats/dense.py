"""The dense format: a plain Hugging Face folder in which removed weights are zeros."""

import contextlib
import copy
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import cached_file

from ..model.load import load_model, quiet
from ..model.targets import is_multimodal
from .audit import Part, WrongZeros, ZeroCount, audit, stored_tensors

_SHARD_SIZE = "5GB"
_PROCESSOR_FILES = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json",
    "chat_template.jinja",
)  # fmt: skip

load = load_model  # a dense folder is an ordinary model


def model_bytes(model) -> int:
    """Bytes of a model's parameters and buffers: what its dense folder takes on disk."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def write(folder: Path, model, tokenizer) -> None:
    """Write a model into a folder, in its own dtype, with all that is needed to load it.

    Args:
        folder: an existing folder.
        model: a Hugging Face model. Of a multimodal one, the files of its image processor are copied too.
        tokenizer: None writes none.

    Raises:
        OSError, safetensors.SafetensorError: the file system refuses; see files.user_errors().
    """
    with quiet(), _savable_generation_config(model):
        model.save_pretrained(folder, max_shard_size=_SHARD_SIZE)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if is_multimodal(model):
            _copy_processor_files(model.config.name_or_path, folder)


def count_zeros(
    folder: str | Path, names: Sequence[str], *, model=None, slices: Mapping[str, Part] | None = None
) -> dict[str, ZeroCount]:
    """Count the zeros of matrices in the files of a folder.

    Args:
        folder: a folder of write().
        names: modules that own the matrices. The matrix of a module is the tensor `name + ".weight"`.
        model: the model that was written. With it, matrices are also found that transformers stores under another
            name or in several tensors.
        slices: name -> where the model holds a matrix that is one slice of a parameter (fused experts). Found only
            with `model`.

    Returns:
        name -> count, without the matrices that were not found in the files.

    Raises:
        UserError: a file is missing or unreadable.
    """
    files, slices = stored_tensors(folder), slices or {}
    parts = {
        name: [Part(f"{name}.weight")] for name in names if name not in slices and f"{name}.weight" in files
    }  # fmt: skip
    others = [name for name in names if name not in parts]
    if model is not None and others:
        parts |= _trace(model, others, slices, Path(folder), files)
    return audit(folder, [name for name in names if parts.get(name)], parts=parts)


def verify(
    folder: str | Path, expected: Mapping[str, ZeroCount], *, model=None, slices: Mapping[str, Part] | None = None
) -> list[str]:
    """Compare the zeros in the files of a folder with the expected ones.

    Args:
        folder, model, slices: as in count_zeros().
        expected: name of a module -> count of its matrix.

    Returns:
        Names of the matrices that were not found in the files, and so not compared.

    Raises:
        WrongZeros: a matrix differs; the first one is named.
        UserError: a file is missing or unreadable.
    """
    counts = count_zeros(folder, list(expected), model=model, slices=slices)
    for name, count in counts.items():
        if count != expected[name]:
            raise WrongZeros(name, count, expected[name])
    return [name for name in expected if name not in counts]


def _trace(
    model, names: Sequence[str], slices: Mapping[str, Part], folder: Path, files: Iterable[str]
) -> dict[str, list[Part]]:
    """Finds the parts of matrices that transformers renames, or splits, when it saves a model.

    A second save shows where each matrix goes: it saves small tensors in place of the weights, each filled with the
    number of its matrix. A matrix that does not reappear has no parts.
    """
    tags: dict[str, Tensor] = {}
    for number, name in enumerate(names):
        if name in slices:
            parameter, index = slices[name]
            experts = len(model.get_parameter(parameter))
            tags.setdefault(parameter, torch.full((experts, 2, 2), -1, dtype=torch.int64, device="cpu"))[index] = number
        else:
            tags[f"{name}.weight"] = torch.full((2, 2), number, dtype=torch.int64, device="cpu")
    parts: dict[str, list[Part]] = {name: [] for name in names}
    # some models cannot save such small tensors
    with tempfile.TemporaryDirectory(dir=folder) as place, contextlib.suppress(IndexError, RuntimeError, ValueError):
        with quiet(), _savable_generation_config(model):
            model.save_pretrained(place, state_dict=tags)
        for tensor, tag in load_file(Path(place, "model.safetensors")).items():
            for index, piece in [(None, tag)] if tag.dim() < 3 else enumerate(tag):
                numbers = piece.unique().tolist()
                if len(numbers) == 1 and 0 <= numbers[0] < len(names) and tensor in files:
                    parts[names[numbers[0]]].append(Part(tensor, index))
    return parts


@contextlib.contextmanager
def _savable_generation_config(model) -> Iterator[None]:
    """Lets transformers save a generation config with sampling flags but without `do_sample`, which it loads."""
    original = getattr(model, "generation_config", None)
    if original is not None:
        try:
            original.validate(strict=True)
        except ValueError:
            model.generation_config = copy.deepcopy(original)
            model.generation_config.do_sample = True
    try:
        yield
    finally:
        if original is not None:
            model.generation_config = original


def _copy_processor_files(name: str, folder: Path) -> None:
    """Copies the settings of the image processor that come with the model `name`, unchanged."""
    for file in _PROCESSOR_FILES:
        with contextlib.suppress(OSError, ValueError):
            source = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
            if source is not None and not (folder / file).exists():
                shutil.copyfile(source, folder / file)
