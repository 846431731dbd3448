"""The dense format: a plain Hugging Face folder in which removed weights are zeros."""

import contextlib
import copy
import errno
import json
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..errors import UserError, one_line
from ..model.attributes import replaced
from ..model.load import load_model, quiet
from ..model.placement import is_sharded
from ..model.sharding import gathered_parts
from .audit import Part, WrongZeros, ZeroCount, audit, stored_tensors
from .files import system_error

FILE_BYTES = 5 * 10**9

load = load_model  # a dense folder is an ordinary model


def model_bytes(model) -> int:
    """Bytes of a model's parameters and buffers: what its dense folder takes on disk."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def write(folder: Path, model, tokenizer) -> None:
    """Write a model into a folder, in its own dtype, with all that is needed to load it.

    Args:
        folder: an existing folder.
        model: a Hugging Face model.
        tokenizer: None writes none.

    Raises:
        UserError: as write_settings().
        OSError, safetensors.SafetensorError: the file system refuses; see files.user_errors().
    """
    write_settings(folder, model, tokenizer)
    by_name = {model: partial(_tensor_of, model)}  # transformers 4 asks for lazy tensors so, and some are buffers
    with quiet(), _settings_kept(model), replaced("get_parameter", by_name):
        if is_sharded(model):
            _write_parts(folder, model)
        else:
            model.save_pretrained(folder, max_shard_size=FILE_BYTES)


def _tensor_of(model, name: str) -> Tensor:
    """A parameter or a buffer."""
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)


def _write_parts(folder: Path, model) -> None:
    """Writes the weights that several ranks share, with one file in memory at a time; see gathered_parts()."""
    parts = []
    for weights in gathered_parts(model, FILE_BYTES):
        model.save_pretrained(folder, state_dict=weights, max_shard_size=2**60)
        parts.append((folder / SAFE_WEIGHTS_NAME).rename(folder / f"part-{len(parts)}"))
    if len(parts) == 1:
        parts[0].rename(folder / SAFE_WEIGHTS_NAME)
        return
    places: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = part.rename(folder / f"model-{number:05}-of-{len(parts):05}.safetensors")
        with safe_open(file, framework="pt") as tensors:
            places |= dict.fromkeys(tensors.keys(), file.name)
    metadata = {"total_parameters": model.num_parameters(), "total_size": model_bytes(model)}
    index = json.dumps({"metadata": metadata, "weight_map": places}, indent=2, sort_keys=True)
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(index + "\n", encoding="utf-8")


def give_shares(model) -> None:
    """What the other ranks do while the first calls write()."""
    if is_sharded(model):
        for _ in gathered_parts(model, FILE_BYTES):
            pass


def write_settings(folder: Path, model, tokenizer) -> None:
    """Write what write() does beside the weights, and read the configs back.

    Args:
        folder, model, tokenizer: as in write().

    Raises:
        UserError: the config, the generation config or the tokenizer cannot be saved, or could not be loaded again.
        OSError: the file system refuses.
    """
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _savable("the config of the model", folder):
            copy.deepcopy(model.config).save_pretrained(folder)
            type(model.config).from_pretrained(folder)
        with _savable("the generation config of the model", folder):
            generation = getattr(model, "generation_config", None)
            _AsItIs(generation).save_pretrained(folder)
            if generation is not None:
                type(generation).from_pretrained(folder)
        if tokenizer is not None:
            with _savable(f"the tokenizer ({type(tokenizer).__name__})", folder):
                tokenizer.save_pretrained(folder)


def count_zeros(
    folder: str | Path, names: Sequence[str], *, model=None, slices: Mapping[str, Part] | None = None
) -> dict[str, ZeroCount]:
    """Count the zeros of matrices in the files of a folder.

    Args:
        folder: a folder of write().
        names: modules that own the matrices. The matrix of a module is the tensor `name + ".weight"`.
        model: the model that was written. With it, matrices are also found that transformers stores under another
            name or in several tensors.
        slices: name -> where the model holds a matrix that is one slice of a parameter (fused experts). Without
            `model` it is found only if the files hold the parameter under its own name.

    Returns:
        name -> count, without the matrices that were not found in the files.

    Raises:
        UserError: a file is missing or unreadable.
    """
    files, slices = stored_tensors(folder), slices or {}
    parts = {
        name: [Part(f"{name}.weight")] for name in names if name not in slices and f"{name}.weight" in files
    }  # fmt: skip
    if model is None:
        parts |= {name: [slices[name]] for name in names if name in slices and slices[name].tensor in files}
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

    A matrix that save_tags() does not bring back has no parts.
    """
    parameters = dict(model.named_parameters())
    tags: dict[str, Tensor] = {}
    for number, name in enumerate(names):
        if name not in slices:
            tags[f"{name}.weight"] = tag_of(number)
        elif (parameter := slices[name].tensor) in parameters:
            experts = len(parameters[parameter])
            tags.setdefault(parameter, tag_of(-1).repeat(experts, 1, 1))[slices[name].index] = number
    beside = [name for name, p in parameters.items() if p.dim() == 2 and name not in files and name not in tags]
    tags |= {name: tag_of(number) for number, name in enumerate(beside, len(names))}
    owners = [f"{name}.weight" for name in names] + beside
    parts: dict[str, list[Part]] = {name: [] for name in owners}
    for tensor, tag in save_tags(model, tags, folder).items():
        for index, piece in [(None, tag)] if tag.dim() < 3 else enumerate(tag):
            numbers = [band.unique().tolist() for band in piece.split(2)]
            if tensor not in files or any(len(found) != 1 or not 0 <= found[0] < len(owners) for found in numbers):
                continue
            found = [owners[number] for (number,) in numbers]
            if len(found) == 1:
                parts[found[0]].append(Part(tensor, index))
            elif index is None and all(name in parameters for name in found):
                start = 0  # the matrices of several layers, one below the other
                for name in found:
                    stop = start + len(parameters[name])
                    parts[name].append(Part(tensor, slice(start, stop)))
                    start = stop
    return {name: parts[f"{name}.weight"] for name in names}


def tag_of(number: int) -> Tensor:
    """A small matrix that stands for another one; see save_tags()."""
    return torch.full((2, 2), number, dtype=torch.int64, device="cpu")


def save_tags(model, tags: Mapping[str, Tensor], folder: str | Path) -> dict[str, Tensor]:
    """Show under which names, and in which pieces, transformers saves tensors of a model.

    Args:
        model: whose classes decide that.
        tags: name in the state dict -> a small tensor that is saved in its place; [E, 2, 2] for experts.
        folder: where they are saved for a moment.

    Returns:
        Name in the files -> what is left of the small tensors; nothing if the model cannot save such.
    """
    saved: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory(dir=folder) as place, contextlib.suppress(IndexError, RuntimeError, ValueError):
        # a quantiser would bring back the whole state dict
        with quiet(), _settings_kept(model), replaced("hf_quantizer", {model: None}):
            model.save_pretrained(place, state_dict=dict(tags))
        saved = load_file(Path(place, "model.safetensors"))
    return saved


class _AsItIs:
    """Stands for a generation config while a model is saved, and writes it without changes.

    transformers refuses to save some of the flags that it loads, such as a temperature without `do_sample`. They stay
    in the file, because without them, or with others beside them, generate() may do something else.
    """

    def __init__(self, original):
        self._original = original

    def save_pretrained(self, folder, **_kwargs) -> None:
        if self._original is not None:
            written = copy.deepcopy(self._original)
            written.compile_config = None  # of the machine, not of the model
            written.to_json_file(Path(folder, GENERATION_CONFIG_NAME))


@contextlib.contextmanager
def _settings_kept(model) -> Iterator[None]:
    """Lets transformers save a model with its generation config as it is, and keeps its settings from being changed."""
    before = {name: vars(model)[name] for name in ("config", "generation_config") if name in vars(model)}
    model.config = copy.deepcopy(model.config)
    model.generation_config = _AsItIs(before.get("generation_config"))
    try:
        yield
    finally:
        del model.generation_config
        for name, value in before.items():
            setattr(model, name, value)


@contextlib.contextmanager
def _savable(what: str, folder: Path) -> Iterator[None]:
    """Turns errors inside into a UserError that says what cannot be saved; transformers raises all kinds.

    What the file system refuses in `folder` is raised as it is. A file that is missing elsewhere is one of the model.
    """
    try:
        yield
    except Exception as error:
        number = system_error(error)
        if number and (number != errno.ENOENT or not folder.exists()):
            raise
        raise UserError(f"{what} cannot be saved and loaded again ({one_line(error)}); correct it first") from error
