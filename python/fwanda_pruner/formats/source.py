"""The folder that a model was loaded from: what lies there beside the weights that the model holds."""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

import torch
from transformers.utils import cached_file

from ..errors import UserError
from ..model.checks import ignored
from ..model.packed import EXPERT, packed_weights
from ..model.packed_quantizer import named_as
from ..model.targets import find_blocks
from ..notes import warn
from . import dense
from .audit import stored_tensors

# Files that users of a model need and that neither the model nor its tokenizer writes, by name in lower case.
_CARRIED = (
    "*licen[cs]e*", "copying*", "copyright*", "*notice*", "*terms*", "*use_policy*", "eula*", "patents*", "authors*",
    "citation*", "*preprocessor_config.json", "processor_config.json",
)  # fmt: skip
_TEMPLATES = ("*.jinja", "chat_template*")
_VOCABULARIES = ("*.model", "*.tiktoken", "vocab.*", "merges.txt")  # other programs read them
# Files that are fetched for a model of the hub, because loading does not download them. Each costs a request.
_ON_THE_HUB = (
    "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "USE_POLICY.md", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
# Buffers that a model computes itself; older checkpoints hold them.
_COMPUTED = re.compile(r"(^|\.)(inv_freq|masked_bias|position_ids|(attn|attention)\.bias|(cos|sin)_cached)$")

_TOWERS = ("vision", "visual", "audio", "speech", "image")  # their blocks have names like those of the language model


def source_folder(model) -> Path | None:
    """The folder of a model's files, from which it was loaded; of a model of the hub, its folder in the cache.

    None if the model was made in memory, or loaded from a single file.
    """
    name = getattr(model.config, "name_or_path", None)
    if not name or not isinstance(name, str):
        return None
    with suppress(OSError, ValueError):
        if Path(name).exists():
            return Path(name) if Path(name, "config.json").is_file() else None
        file = cached_file(name, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
        return None if file is None else Path(file).parent
    return None


def carry_files(model, tokenizer, folder: Path) -> list[str]:
    """Copies licences, notices, chat templates and settings of processors to a folder that lacks them, unchanged.

    So are the vocabularies of a tokenizer that comes from the same place as the model, and the code of a model whose
    config names it.

    Args:
        model: gives the folder that it was loaded from.
        tokenizer: written with the model, or None.
        folder: of the written model.

    Returns:
        Names of the files that could not be read.

    Raises:
        OSError: a file cannot be written.
    """
    source, failed = source_folder(model), []
    if source is None:
        return failed
    if not Path(model.config.name_or_path).exists():
        with suppress(OSError, ValueError):  # there may be no network
            for name in _ON_THE_HUB:
                cached_file(model.config.name_or_path, name, _raise_exceptions_for_missing_entries=False)
    own = getattr(tokenizer, "name_or_path", None) == model.config.name_or_path
    patterns = [
        *_CARRIED,
        *(_TEMPLATES if own or tokenizer is None else ()),
        *(_VOCABULARIES if own else ()),
        *(["*.py"] if getattr(model.config, "auto_map", None) else ()),
    ]
    for name in sorted(os.listdir(source)) if os.access(source, os.R_OK) else ():
        wanted = any(fnmatch(name.lower(), pattern) for pattern in patterns)
        if wanted and not (source / name).is_dir() and not (folder / name).exists():
            try:
                if not (source / name).is_file():  # a dangling link, or a pipe
                    raise FileNotFoundError(name)
                content = (source / name).read_bytes()
            except OSError:
                failed.append(name)
            else:
                (folder / name).write_bytes(content)
    return failed


def surplus_layers(model) -> str | None:
    """A warning if the files of a model hold more decoder blocks than the model, else None."""
    source = source_folder(model)
    if source is None:
        return None
    path, blocks = find_blocks(model)
    found = _stored_blocks(source, path)
    surplus = sorted(index for index in found if index >= len(blocks))
    if not surplus:
        return None
    return (
        f"the files of {model.config.name_or_path} hold {len(found)} blocks, the model has {len(blocks)}: block "
        f"{surplus[0]} and those after it are neither pruned nor saved; they are layers for the prediction of several "
        f"tokens, or config.json has a wrong number of layers"
    )


def warn_of_ignored(model) -> None:
    """Warns of tensors in the files that a model was loaded from and does not use."""
    names = [name for name in ignored.get(model, ()) if not _COMPUTED.search(name)]
    if names:
        warn(
            f"the model does not use {len(names)} tensors of the files of {model.config.name_or_path}; the first is "
            f"{names[0]}"
        )


def lost_tensors(model, folder: Path) -> str | None:
    """A warning that names tensors of the files a model was loaded from that its saved files lack, else None.

    Says nothing where the saved files name most tensors in another way.
    """
    source = source_folder(model)
    if source is None:
        return None
    prefix = f"{model.base_model_prefix}." if getattr(model, "base_model_prefix", "") else ""
    names = (*stored_tensors(folder), *model.state_dict(), *_names_in_files(model, folder))
    held = {name.removeprefix(prefix) for name in names}
    # a packed folder is loaded only if the model has all its packed experts
    stored = [name for name in _stored(source) if not _COMPUTED.search(name) and not EXPERT.fullmatch(name)]
    lost = sorted(name for name in stored if name.removeprefix(prefix) not in held)
    if not lost or 2 * len(lost) > len(stored):
        return None
    return (
        f"{len(lost)} tensors of {model.config.name_or_path} are not in the saved files, because the model does not "
        f"use them; the first is {lost[0]}. If you need them, e.g. to predict several tokens, take them from there"
    )


def _names_in_files(model, folder: Path) -> Iterable[str]:
    """Names of fused experts and of matrices in dense and in packed files of a model, whether it is packed or not."""
    experts = {name: len(tensor) for name, tensor in model.named_parameters() if tensor.dim() == 3}
    matrices = {name: dense.tag_of(0) for name, tensor in model.named_parameters() if tensor.dim() == 2}
    for name, _, _ in packed_weights(model):
        if match := EXPERT.fullmatch(name):
            parameter = f"{match[1]}.{match[2]}"
            experts[parameter] = experts.get(parameter, 0) + 1
        else:
            matrices[name] = dense.tag_of(0)
    yield from experts
    for form in ("dense", "packed"):
        with named_as(form, model):
            for tags in ({name: dense.tag_of(0).repeat(count, 1, 1) for name, count in experts.items()}, matrices):
                yield from dense.save_tags(model, tags, folder) if tags else ()


def _stored_blocks(folder: Path, path: str) -> set[int]:
    """Indices of the decoder blocks in the weight files of a folder. Those of towers and extra heads do not count.

    Files may name the parents of the blocks in another order than `path`, the path in the model, or not at all.
    """
    parents, _, last = path.rpartition(".")
    step = re.compile(rf"(?:^|\.){re.escape(last)}\.(\d+)\.")
    found = set()
    for name in _stored(folder):
        if match := step.search(name):
            before = name[: match.start()]
            tower = any(word in before and word not in path for word in _TOWERS)
            if not tower and (not before or set(parents.split(".")) <= set(before.split("."))):
                found.add(int(match[1]))
    return found


def _stored(folder: Path) -> Iterable[str]:
    """Names of the tensors in the weight files of a folder; none if they cannot be read."""
    with suppress(UserError):
        return stored_tensors(folder)
    names: list[str] = []
    for file in sorted(folder.glob("pytorch_model*.bin")):
        with suppress(Exception):  # a pickle can be broken in any way; weights_only runs no code of it
            names += torch.load(file, map_location="meta", weights_only=True, mmap=True)
    return names
