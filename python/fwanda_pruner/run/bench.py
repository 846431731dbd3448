"""Compares the dense and the packed form of a pruned model: tokens per second, latency, energy and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..engine.device import evaluating
from ..errors import UserError
from ..model.load import is_packed, load_model, load_packed
from ..model.pack import pack_
from ..progress import begin_stage, planned
from .energy import EnergyMeter

PROMPT = 16  # tokens that decoding starts from
EXTRA = 4  # steps of decoding beside those that are measured


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        form: dense or packed.
        work: "decode eager" (one token after the other), "decode graphs" (the same with a static cache, compiled to
            CUDA graphs) or "prefill" (a whole prompt in one pass).
        batch: sequences at once.
        tokens: decoded for each sequence, or in the prompt.
        tokens_per_s: of all sequences together.
        ms: median time of a step of decoding, or of the prompt.
        joules_per_token: gross energy of the GPU, or why it was not measured.
        weight_bytes: parameters and buffers in memory.
    """

    form: str
    work: str
    batch: int
    tokens: int
    tokens_per_s: float
    ms: float
    joules_per_token: float | str
    weight_bytes: int


def bench(
    folder: str | Path,
    *,
    device: str = "auto",
    dtype: str | None = None,
    batches: tuple[int, ...] = (1, 4, 16),
    tokens: int = 64,
    prompts: tuple[int, ...] = (512, 2048),
) -> list[Row]:
    """Measure the dense and the packed form of a pruned model.

    Args:
        folder: a packed or a dense folder, or another name that load_model() takes.
        device, dtype: as load_model().
        batches: sequences that are decoded at once.
        tokens: decoded for each sequence.
        prompts: lengths of prompts that are read in one pass.

    Raises:
        UserError: as load_model() or pack_(); a number is not positive, or more tokens than the model has positions.
    """
    if min(*batches, *prompts, tokens) < 1:
        raise UserError("bench: batches, tokens and prompts must be at least 1")
    rows = []
    with planned(["dense", "packed"]):
        for form in ("dense", "packed"):
            begin_stage(form)
            model = _load(folder, form, device, dtype)
            _check_lengths(model, tokens, prompts)
            with evaluating(model), torch.no_grad():
                rows += _rows(model, form, batches, tokens, prompts)
            del model
    return rows


def _check_lengths(model: nn.Module, tokens: int, prompts: tuple[int, ...]) -> None:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is None:
        return
    for flag, length in (("--prompts", max(prompts)), ("--tokens", PROMPT + tokens + EXTRA)):
        if length > most:
            raise UserError(f"bench: the model reads at most {most} tokens, {flag} asks for {length}; give fewer")


def table(rows: list[Row]) -> str:
    """The rows as text, the packed ones with their speed against the dense ones."""
    dense = {(row.work, row.batch, row.tokens): row for row in rows if row.form == "dense"}
    lines = [f"{'form':7} {'work':13} {'batch':>5} {'tokens':>6} {'tokens/s':>10} {'ms':>9} {'weights MB':>10}  speed"]
    for row in rows:
        speed = row.tokens_per_s / dense[row.work, row.batch, row.tokens].tokens_per_s
        size = f"{row.weight_bytes / 1e6:10.1f}"
        lines.append(
            f"{row.form:7} {row.work:13} {row.batch:5} {row.tokens:6} {row.tokens_per_s:10.1f} {row.ms:9.2f} {size}"
            f"  {speed:.2f}x"
        )
    joules = {row.joules_per_token for row in rows if isinstance(row.joules_per_token, str)}
    measured = [
        f"{row.form} batch {row.batch} {row.joules_per_token:.3f}" for row in rows if row.joules_per_token not in joules
    ]
    energy = ", ".join(measured) if measured else "; ".join(sorted(joules))
    return "\n".join([*lines, f"J/token: {energy}"])


def as_dicts(rows: list[Row]) -> list[dict]:
    """The rows as JSON values."""
    return [asdict(row) for row in rows]


def _load(folder: str | Path, form: str, device: str, dtype: str | None) -> nn.Module:
    if form == "packed" and is_packed(folder):
        return load_packed(folder, device=device, dtype=dtype).model
    model = load_model(folder, device=device, dtype=dtype).model
    return pack_(model) if form == "packed" else model


def _rows(model: nn.Module, form: str, batches: tuple[int, ...], tokens: int, prompts: tuple[int, ...]) -> list[Row]:
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    device, vocabulary = model.device, model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)

    def prompt(batch: int, length: int) -> Tensor:
        return torch.randint(vocabulary, (batch, length), generator=generator).to(device)

    rows = []
    works = {"decode eager": decode_steps} | ({"decode graphs": graph_steps} if device.type == "cuda" else {})
    for work, steps_of in works.items():
        for batch in batches:
            step = steps_of(model, prompt(batch, PROMPT), tokens + EXTRA)
            times, joules = _timed(step, tokens, device)
            ms = 1e3 * statistics.median(times)
            per_token = joules if isinstance(joules, str) else joules / (batch * tokens)
            rows.append(Row(form, work, batch, tokens, 1e3 * batch / ms, ms, per_token, size))
    for length in prompts:
        ids = prompt(1, length)
        times, joules = _timed(lambda ids=ids: model(input_ids=ids, use_cache=False, logits_to_keep=1), 3, device)
        ms = 1e3 * statistics.median(times)
        per_token = joules if isinstance(joules, str) else joules / (3 * length)
        rows.append(Row(form, "prefill", 1, length, 1e3 * length / ms, ms, per_token, size))
    return rows


def decode_steps(model: nn.Module, prompt: Tensor, _most: int) -> Callable[[], object]:
    """A function that decodes one more token of each sequence greedily, with a growing cache."""
    out = model(input_ids=prompt, use_cache=True)
    state = {"cache": out.past_key_values, "token": out.logits[:, -1:].argmax(-1)}

    def step() -> None:
        out = model(input_ids=state["token"], past_key_values=state["cache"], use_cache=True)
        state["token"] = out.logits[:, -1:].argmax(-1)

    return step


def graph_steps(model: nn.Module, prompt: Tensor, most: int) -> Callable[[], object]:
    """The same with a static cache, as CUDA graphs of torch.compile."""
    from transformers import StaticCache

    length = prompt.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=length + most)
    position = torch.arange(length, device=prompt.device)
    out = model(input_ids=prompt, past_key_values=cache, cache_position=position, use_cache=True)
    state = {"token": out.logits[:, -1:].argmax(-1), "position": position[-1:] + 1}
    compiled = torch.compile(model.forward, mode="reduce-overhead", dynamic=False)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(
            input_ids=state["token"], past_key_values=cache, cache_position=state["position"], use_cache=True
        )
        state["token"] = out.logits[:, -1:].argmax(-1).clone()
        state["position"] += 1

    return step


def _timed(step: Callable[[], object], count: int, device: torch.device) -> tuple[list[float], float | str]:
    """Seconds of each of `count` steps, after three warm-up steps, and the joules of all."""
    for _ in range(3):
        step()
    times = []
    with EnergyMeter(device) as meter:
        for _ in range(count):
            _wait(device)
            start = time.perf_counter()
            step()
            _wait(device)
            times.append(time.perf_counter() - start)
    return times, meter.result


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
