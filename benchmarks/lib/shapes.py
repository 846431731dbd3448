"""Public model shapes with random weights, the FLOPs of a calibration pass over them, and the card's GEMM roof."""

from __future__ import annotations

import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

from fwanda_pruner.engine.memory import pinned

# The rotary base keeps its default: no speed depends on it.
SHAPES = {
    "llama-2-7b": ("Llama", {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
    }),
    "llama-2-13b": ("Llama", {
        "vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
        "num_attention_heads": 40, "num_key_value_heads": 40, "max_position_embeddings": 4096,
    }),
    "codellama-34b": ("Llama", {
        "vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 22016, "num_hidden_layers": 48,
        "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 16384,
    }),
    "llama-3-8b": ("Llama", {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    }),
    "mistral-7b": ("Mistral", {
        "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768, "sliding_window": None,
    }),
    "qwen2.5-7b": ("Qwen2", {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 131072,
    }),
    "llama-3-70b": ("Llama", {
        "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    }),
    "llama-3-405b": ("Llama", {
        "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    }),
    "tiny": ("Llama", {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    }),
}  # fmt: skip
_ROOF_SIZE = {"cuda": 8192, "cpu": 512}


def build(
    shape: str, dtype: torch.dtype, device: str, seed: int, blocks: int | None = None, *, streamed: bool = False
) -> nn.Module:
    """A causal language model with random weights, made on the device, in eval mode, with an output head of its own.

    Args:
        shape: a key of SHAPES.
        dtype: of the weights.
        device: where they lie; on "meta" they have no values.
        seed: of the weights.
        blocks: number of decoder blocks; None for all of the shape.
        streamed: the weights of the blocks lie in RAM instead, pinned if the device is a GPU. They are the same.
    """
    family, numbers = SHAPES[shape]
    numbers = numbers | ({} if blocks is None else {"num_hidden_layers": blocks})
    config = getattr(transformers, f"{family}Config")(
        **numbers, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    with _default_dtype(dtype), torch.device("meta" if streamed else device):
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    if streamed:
        _allocate(model, device)
    if device != "meta":
        reinitialise(model, seed)
    return model


def _allocate(model: nn.Module, device: str) -> None:
    """Gives memory to a model that has none: blocks in RAM, all else on the device."""
    renew_rotary(model, device)
    for name, parameter in list(model.named_parameters()):
        values, (path, _, last) = torch.empty_like(parameter, device=device), name.rpartition(".")
        if device == "cuda" and name.startswith("model.layers."):
            values = pinned(values)
        setattr(model.get_submodule(path), last, nn.Parameter(values))


def renew_rotary(model: nn.Module, device: str | torch.device) -> None:
    """Computes the rotary embedding of a model on the device: its buffers have values of their own."""
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


@torch.no_grad()
def reinitialise(model: nn.Module, seed: int) -> None:
    """Sets fresh weights in place, the same for one seed and device: matrices normal (0, 0.02), norms 1, biases 0."""
    device = next(model.parameters()).device  # blocks may lie elsewhere
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(fill_(name, torch.empty_like(parameter, device=device), generator))


def fill_(name: str, values: Tensor, generator: torch.Generator) -> Tensor:
    """Fresh values of a parameter of that name, in place: matrices normal (0, 0.02), norms 1, biases 0."""
    if values.dim() > 1:
        return values.normal_(0, 0.02, generator=generator)
    return values.fill_(0 if name.endswith("bias") else 1)


@contextmanager
def _default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class PassFlops:
    """FLOPs of one forward pass over the calibration windows, by part.

    Attributes:
        linears: 2 P T, with P weights in the blocks' linear layers and T tokens.
        attention: causal, 2 L^2 for each head channel, layer and window. These are two products of 2 L^2 each, of which
            the mask hides half.
        head: 2 V H T, with the vocabulary V and the hidden size H.
    """

    linears: int
    attention: int
    head: int

    @classmethod
    def of(cls, model: nn.Module, weights: int, windows: int, length: int) -> PassFlops:
        """Of `windows` windows of `length` tokens, with `weights` weights in the linear layers of the blocks."""
        config = model.config
        channels = config.num_attention_heads * (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        return cls(
            linears=2 * weights * windows * length,
            attention=2 * length**2 * channels * config.num_hidden_layers * windows,
            head=2 * config.vocab_size * config.hidden_size * windows * length,
        )

    @property
    def forward(self) -> float:
        """A forward pass through the blocks, which is all that Wanda needs: 2 P T + attention."""
        return self.linears + self.attention

    @property
    def forward_backward(self) -> float:
        """With a backward pass from the loss that forms no weight gradients: 4 P T + 3.5 attention + 2 head."""
        return 2 * self.linears + 3.5 * self.attention + 2 * self.head


def gemm_roof(device: str, dtype: torch.dtype, seconds: float) -> dict:
    """Median rate of square matrix products of random data over some seconds: {"tflop_per_s", "size", "seconds"}."""
    size = _ROOF_SIZE[device]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    times, start = [], time.perf_counter()
    while time.perf_counter() - start < seconds:
        times.append(_once_cuda(a, b, out) if device == "cuda" else _once_cpu(a, b, out))
    return {"tflop_per_s": 2 * size**3 / statistics.median(times) / 1e12, "size": size, "seconds": seconds}


def _once_cuda(a, b, out, products: int = 10) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(products):
        torch.mm(a, b, out=out)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / products / 1e3


def _once_cpu(a, b, out) -> float:
    start = time.perf_counter()
    torch.mm(a, b, out=out)
    return time.perf_counter() - start
