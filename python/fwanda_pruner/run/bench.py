"""Compares the dense and the packed form of a pruned model: tokens per second, latency, energy and memory."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..engine.decode import Decoder
from ..engine.device import evaluating
from ..errors import UserError, shortened
from ..formats.source import warn_of_ignored
from ..model.load import is_packed, load_model, load_packed
from ..model.pack import pack_, sparse_targets
from ..progress import begin_stage, planned, progress_bar
from .energy import EnergyMeter

PROMPT = 16  # tokens that decoding starts from
EXTRA = 4  # steps of decoding beside those that are measured
MOST = {"batches": 1024, "tokens": 100_000, "prompts": 1_000_000}  # what bench() takes
_MOST_VALUES = 32  # batches or prompts in one call
_RESOLVED = 2.2  # seconds; the energy meter resolves 2.0


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        form: dense or packed.
        work: "decode eager" (one token after the other), "decode graphs" (the same with a static cache, each step
            recorded as a CUDA graph) or "prefill" (a whole prompt in one pass).
        batch: sequences at once.
        tokens: decoded for each sequence, or in the prompt.
        tokens_per_s: of all sequences together.
        ms: median time of a step of decoding, or of the prompt; with graphs, of a whole sequence divided by its tokens.
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
        UserError: as load_model() or sparse_targets(); a number is beyond MOST, more tokens than the model has
            positions, or a batch or a prompt that does not fit the memory.
    """
    for name, numbers in {"batches": batches, "prompts": prompts, "tokens": (tokens,)}.items():
        if not all(1 <= number <= MOST[name] for number in numbers) or len(numbers) > _MOST_VALUES:
            got = ",".join(map(str, numbers))
            several = f", at most {_MOST_VALUES} of them" if name != "tokens" else ""
            raise UserError(f"--{name} must be in [1, {MOST[name]}]{several}, got {shortened(got)}")
    rows = []
    with planned(["dense", "packed"]):
        for form in ("dense", "packed"):
            begin_stage(form)
            model = _load(folder, form, device, dtype)
            if form == "dense":
                warn_of_ignored(model)
            _check_lengths(model, tokens, prompts)
            if form == "dense" and not is_packed(folder):
                sparse_targets(model)  # refuses a dense model before anything is measured
            with evaluating(model):
                rows += measure(model, form, batches=batches, tokens=tokens, prompts=prompts, label=form)
            del model
    return rows


def _check_lengths(model: nn.Module, tokens: int, prompts: tuple[int, ...]) -> None:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is None or most < 0:  # XLNet has -1 for no limit
        return
    for flag, length in (("--prompts", max(prompts)), ("--tokens", PROMPT + tokens + EXTRA)):
        if length > most:
            raise UserError(f"bench: the model reads at most {most} tokens, {flag} asks for {length}; give fewer")


def table(rows: list[Row]) -> str:
    """The rows as text, the packed ones with their speed against the dense ones."""
    dense = {(row.work, row.batch, row.tokens): row for row in rows if row.form == "dense"}
    lines = [f"{'form':12} {'work':13} {'batch':>5} {'tokens':>6} {'tokens/s':>10} {'ms':>9} {'weights MB':>10}  speed"]
    for row in rows:
        speed = row.tokens_per_s / dense[row.work, row.batch, row.tokens].tokens_per_s
        size = f"{row.weight_bytes / 1e6:10.1f}"
        lines.append(
            f"{row.form:12} {row.work:13} {row.batch:5} {row.tokens:6} {row.tokens_per_s:10.1f} {row.ms:9.2f} {size}"
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


@torch.no_grad()
def measure(
    model: nn.Module,
    form: str,
    *,
    batches: Sequence[int],
    tokens: int,
    prompts: Sequence[int],
    label: str | None = None,
) -> list[Row]:
    """Measure a model as it is, in evaluation mode.

    Args:
        form: names the model in the rows.
        batches, tokens, prompts: as bench().
        label: title of the progress bar; None shows none.

    Raises:
        UserError: a batch or a prompt does not fit the memory.
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    device, vocabulary = model.device, model.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    graphs = batches if device.type == "cuda" else ()
    rows = []

    def prompt(batch: int, length: int) -> Tensor:
        return torch.randint(vocabulary, (batch, length), generator=generator).to(device)

    def add(work: str, batch: int, steps: int, per_step: int, timing: tuple[float, float | str]) -> None:
        bar.update(1)
        ms, joules = timing
        per_token = joules if isinstance(joules, str) else joules / per_step
        rows.append(Row(form, work, batch, steps, 1e3 * per_step / ms, ms, per_token, size))

    total = len(batches) + len(graphs) + len(prompts)
    with progress_bar(label=label, unit="measurements", total=total) as bar:
        for batch in batches:
            with _fitting(f"--batches {batch}", device):
                step = decode_steps(model, prompt(batch, PROMPT))
                add("decode eager", batch, tokens, batch, _timed(step, tokens, device))
        for batch in graphs:
            with _fitting(f"--batches {batch}", device):
                uniforms = torch.rand(batch, tokens, generator=generator).double()
                step = partial(Decoder(model, batch, tokens).draw, uniforms, 0, lambda _: None)
                ms, joules = _timed(step, 1, device, seconds=_RESOLVED)
                joules = joules if isinstance(joules, str) else joules / tokens
                add("decode graphs", batch, tokens, batch, (ms / tokens, joules))
        for length in prompts:
            with _fitting(f"--prompts {length}", device):
                step = partial(model, input_ids=prompt(1, length), use_cache=False, logits_to_keep=1)
                add("prefill", 1, length, length, _timed(step, 3, device, seconds=_RESOLVED))
    return rows


@contextmanager
def _fitting(setting: str, device: torch.device) -> Iterator[None]:
    """Turns what a device says when its memory ends into a UserError that names the setting."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise UserError(f"bench: {setting} does not fit the memory of {device}; give less") from error
        raise


def decode_steps(model: nn.Module, prompt: Tensor) -> Callable[[], object]:
    """A function that decodes one more token of each sequence greedily, with a growing cache."""
    out = model(input_ids=prompt, use_cache=True)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # the older name
    if getattr(out, name, None) is None:
        raise UserError(f"bench: {type(model).__name__} returns no {name}, so its decoding cannot be timed")
    state = {"cache": getattr(out, name), "token": out.logits[:, -1:].argmax(-1)}

    def step() -> None:
        out = model(input_ids=state["token"], use_cache=True, **{name: state["cache"]})
        state["token"] = out.logits[:, -1:].argmax(-1)

    return step


def _timed(
    step: Callable[[], object], count: int, device: torch.device, *, seconds: float = 0.0
) -> tuple[float, float | str]:
    """Median milliseconds and joules of a step, after three to warm up.

    Args:
        count: steps to measure at least.
        seconds: how long to measure at least on a GPU, whose energy counter does not resolve less.
    """
    for _ in range(3):
        step()
    times: list[float] = []
    with EnergyMeter(device) as meter:
        while len(times) < count or (device.type == "cuda" and sum(times) < seconds):
            _wait(device)
            start = time.perf_counter()
            step()
            _wait(device)
            times.append(time.perf_counter() - start)
    joules = meter.result
    return 1e3 * statistics.median(times), joules if isinstance(joules, str) else joules / len(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
