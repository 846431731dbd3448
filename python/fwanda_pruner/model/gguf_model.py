"""A GGUF file as a model of transformers: converted once, then loaded from a copy in the cache."""

import contextlib
import hashlib
import io
import json
import math
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..errors import UserError, one_line
from ..notes import warn
from .cache import NotKept, file_sha256, keep_folder, kept_folder, remove_folder
from .checks import auto_class, check_loaded, loading_errors
from .gguf_file import GgufFile, read_gguf, served

_FORMAT = 1  # of the copy; a change here leaves older copies unused


def load_gguf(file: Path, dtype: torch.dtype):
    """Load the model and the tokenizer of a GGUF file, with weights in one dtype.

    The first load converts the file and keeps a copy, a Hugging Face folder, in the cache. A copy serves files of the
    same content, for the same dtype and the same versions of transformers and gguf.

    Raises:
        UserError: the file is no complete GGUF file, or holds no causal language model.

    Warns:
        UserWarning: the copy cannot be kept, or was broken.
    """
    with loading_errors(f"model {str(file)!r} cannot be read"):
        key = _key(file, dtype)
    try:
        if copy := kept_folder(key):
            return _load_copy(copy, dtype)
    except Exception as error:  # a broken copy can raise anything
        warn(f"the converted copy of {file.name} is made anew: {one_line(error, 200)}")
        remove_folder(key)
    with loading_errors(f"model {str(file)!r} is not a complete GGUF file"):
        content = read_gguf(file)
    model, tokenizer = _convert(content, dtype)
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    try:
        copy = keep_folder(key, lambda folder: _write(folder, model, tokenizer), size)
    except NotKept as reason:
        warn(f"{file.name} is converted at each load, because no copy can be kept: {reason}")
        return model, tokenizer
    expected = _digest(model, tokenizer)
    del model, tokenizer  # a large model would be in memory twice
    model, tokenizer = _load_copy(copy, dtype)
    if _digest(model, tokenizer) == expected:
        return model, tokenizer
    remove_folder(key)
    warn(f"{file.name} is converted at each load, because its copy would differ")
    return _convert(content, dtype)


def _key(file: Path, dtype: torch.dtype) -> str:
    parts = [_FORMAT, file_sha256(file), str(dtype), transformers.__version__, version("gguf")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _convert(content: GgufFile, dtype: torch.dtype):
    name, kwargs = str(content.path), {"gguf_file": content.path.name}
    folder = content.path.parent
    with (
        served(content),
        contextlib.redirect_stderr(io.StringIO()),
        loading_errors(f"model {name!r} cannot be read as GGUF"),
    ):
        config = AutoConfig.from_pretrained(folder, **kwargs)
        auto_class(config, name)
        expected = _check_sizes(config, content)
        tokenizer = AutoTokenizer.from_pretrained(folder, **kwargs)
        if hasattr(transformers, "GgufConfig"):
            kwargs["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
        found = {key: tensor.shape for key, tensor in model.state_dict().items()}
        wrong = {(key, shape, expected[key]) for key, shape in found.items() if shape != expected[key]}
        info["mismatched_keys"] = {*info["mismatched_keys"], *wrong}  # transformers up to 5.17 or so do not see these
    check_loaded(model, info, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


def _check_sizes(config, content: GgufFile) -> dict[str, torch.Size]:
    """The shape of each tensor of the model. Refuses a larger model than the file fills, before it takes memory."""
    weights = math.inf
    if content.fits(config):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        weights = sum(p.numel() for p in model.parameters())
    if weights > 2 * content.weights:
        raise UserError(
            f"model {str(content.path)!r}: the file's metadata describe a larger model than its "
            f"{len(content.tensors)} tensors hold; download or convert it again"
        )
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def _write(folder: Path, model, tokenizer) -> None:
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:
        raise NotKept(one_line(error, 200)) from error


def _load_copy(folder: Path, dtype: torch.dtype):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True
    )
    check_loaded(model, info, str(folder))
    return model, AutoTokenizer.from_pretrained(folder)


def _digest(model, tokenizer) -> str:
    """SHA-256 of all that a model computes with, of its settings and of its tokenizer."""
    digest = hashlib.sha256()
    tensors = model.state_dict() | dict(model.named_buffers())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    settings = {**model.config.to_dict(), "architectures": None, "_name_or_path": None}
    generation = {**model.generation_config.to_dict(), "_from_model_config": None} if model.generation_config else None
    words = [tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map, tokenizer.chat_template]
    digest.update(json.dumps([settings, generation, words], sort_keys=True, default=str).encode())
    return digest.hexdigest()
