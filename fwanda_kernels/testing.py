"""Inputs, assertions and timing for tests and benchmarks of the ops, in this project and in others."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from ._checks import WEIGHT_DTYPES, as_count, quoted
from ._dispatch import OPS


def make_weight(
    rows: int, cols: int, dtype: torch.dtype = torch.float32, *, kind: str = "normal", seed: int = 0, device="cpu"
) -> Tensor:
    """Make a [rows, cols] weight of a named kind.

    Args:
        kind: one of KINDS; all but "normal" are hard for a selection (ties, zeros, denormals, extremes, order).

    Raises:
        ValueError: the kind is unknown.
    """
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"make_weight: kind must be one of {', '.join(KINDS)}, got {quoted(kind)}")
    generator = torch.Generator("cpu").manual_seed(seed)
    weight = KINDS[kind](torch.randn(rows, cols, generator=generator, dtype=torch.float32, device="cpu"))
    return weight.to(dtype).to(device)


def _one_huge(w: Tensor) -> Tensor:
    w = w.clone()
    w[:, w.shape[1] // 2 :][:, :1] = 6e4
    return w


KINDS = {
    "normal": lambda w: w,
    "all_equal": lambda w: torch.full_like(w, 0.5),
    "zeros": torch.zeros_like,
    "two_values": lambda w: torch.where(w > 0, 1.0, -0.5).to(w.dtype),
    "heavy_ties": lambda w: (w * 2).round() / 2,
    "denormal": lambda w: w * 1e-40,
    "one_huge": _one_huge,
    "ascending": lambda w: w.sort(dim=1).values,
    "descending": lambda w: w.sort(dim=1, descending=True).values,
}


def make_scale(cols: int, *, seed: int = 0, device="cpu") -> Tensor:
    """Make [cols] fp32 >= 0 with a wide spread and one zero, like the norms of input columns."""
    generator = torch.Generator("cpu").manual_seed(seed + 1)
    scale = torch.randn(cols, generator=generator, dtype=torch.float32, device="cpu").exp()
    if cols > 2:
        scale[cols // 3] = 0
    return scale.to(device)


def make_keep(rows: int, cols: int, *, seed: int = 0, device="cpu") -> Tensor:
    """Make [rows] int64 in [0, cols], with 0, 1, cols - 1 and cols in the first rows."""
    generator = torch.Generator("cpu").manual_seed(seed + 2)
    keep = torch.randint(0, cols + 1, (rows,), generator=generator, device="cpu")
    edges = torch.tensor([0, min(1, cols), max(cols - 1, 0), cols], device="cpu")[:rows]
    keep[: len(edges)] = edges
    return keep.to(device)


def sample_arguments(device="cpu", dtype: torch.dtype = torch.float32) -> dict[str, tuple]:
    """Make small valid arguments for each op `torch.ops.fwanda.<name>`, for opcheck and tracing: {name: arguments}."""
    return {name: op.sample(_inputs(device, dtype)) for name, op in OPS.items()}


def _inputs(device, dtype: torch.dtype) -> SimpleNamespace:
    """New tensors, from which the family files take the sample arguments of their ops."""
    rows, cols, tokens = 6, 16, 24
    half = torch.float16 if dtype == torch.float16 else torch.bfloat16
    x = make_weight(tokens, cols, dtype, seed=3, device=device)
    hessian = x.float().T @ x.float() + torch.eye(cols, dtype=torch.float32, device=device)
    return SimpleNamespace(
        rows=rows,
        cols=cols,
        weight=make_weight(rows, cols, dtype, device=device),
        half_weight=lambda rows, cols: make_weight(rows, cols, half, device=device),
        scale=make_scale(cols, device=device),
        scale_of=lambda cols: make_scale(cols, device=device),
        row_scale=torch.ones(rows, dtype=torch.float32, device=device),
        keep=make_keep(rows, cols, device=device),
        x=x,
        gradient=make_weight(tokens, rows, dtype, seed=4, device=device),
        mask=make_weight(rows, cols, device=device, seed=5) > 0,
        token_mask=torch.arange(tokens, device=device) % 5 != 0,
        hessian=hessian,
        factor=torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True),
        zeros=lambda *shape: torch.zeros(shape, dtype=torch.float32, device=device),
        bad=lambda size: torch.zeros(size, dtype=torch.int32, device=device),
    )


def assert_masks_equal(actual: Tensor, expected: Tensor) -> None:
    """Raise AssertionError naming the first differing position and how many differ."""
    assert actual.dtype == expected.dtype == torch.bool, f"masks must be bool, got {actual.dtype} and {expected.dtype}"
    assert actual.shape == expected.shape, f"shapes differ: {list(actual.shape)} and {list(expected.shape)}"
    different = (actual.cpu() != expected.cpu()).nonzero()
    assert not len(different), (
        f"{len(different)} of {actual.numel()} entries differ, first at {different[0].tolist()}: "
        f"got {bool(actual[tuple(different[0])])}"
    )


_SLEEP_CYCLES = 200_000


@dataclass(frozen=True)
class Timing:
    """Cost of one call.

    Attributes:
        us: median time in microseconds; on a GPU, of the device.
        joules: gross energy of the GPU per call; None if it cannot be measured.
        host_us: median time in microseconds until a call returns, while the GPU is still busy; None on a CPU.
    """

    us: float
    joules: float | None
    host_us: float | None = None

    def gb_per_s(self, size: int) -> float:
        """Rate in 1e9 bytes per second for a call that moves `size` bytes."""
        return size / self.us / 1e3


def bench(
    calls: Sequence[Callable[[], object]],
    *,
    device: str | torch.device = "cpu",
    rounds: int = 10,
    reset: Callable[[], object] | None = None,
    energy_seconds: float = 0.0,
) -> Timing:
    """Time equivalent calls on different buffers, so that none finds its data in a cache.

    Args:
        calls: the same work on rotating buffers; together they should exceed the last-level cache several times.
        device: "cpu" (wall clock) or a CUDA device (events).
        rounds: timed passes over all calls, after one that warms up.
        reset: runs before each pass, outside the timing, so that an in-place op finds fresh data.
        energy_seconds: on a GPU, also repeat the calls (without reset) for this long and read the energy counter.

    Raises:
        ValueError: there is no call, or no round.
    """
    if not len(calls) or as_count("bench", "rounds", rounds) < 1:
        raise ValueError(f"bench: calls and rounds must be at least one each, got {len(calls)} calls, {rounds} rounds")
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    times, of_host = [], []
    for i in range(rounds + 1):
        if reset is not None:
            reset()
        if on_gpu:
            taken, host = _pass_cuda(calls)
        else:
            taken = host = [_once_cpu(call) for call in calls]
        if i:
            times += taken
            of_host += host
    joules = _joules(calls, device, energy_seconds) if energy_seconds else None
    return Timing(statistics.median(times), joules, statistics.median(of_host) if on_gpu else None)


def _once_cpu(call: Callable) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def _pass_cuda(calls: Sequence[Callable]) -> tuple[list[float], list[float]]:
    """Microseconds of each call, on the device and on the host."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * len(calls))]
    torch.cuda._sleep(_SLEEP_CYCLES * (1 + len(calls)))  # so that the host queues all calls before the first one runs
    of_host = []
    for call, start, end in zip(calls, marks[::2], marks[1::2], strict=True):
        start.record()
        of_host.append(_once_cpu(call))
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in zip(marks[::2], marks[1::2], strict=True)], of_host


def _joules(calls: Sequence[Callable], device: torch.device, seconds: float) -> float | None:
    """Joules per call from NVML's total-energy counter; None without one."""
    if device.type != "cuda":
        return None
    with contextlib.suppress(Exception):  # no package, no driver, or a card without the counter
        import pynvml

        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        torch.cuda.synchronize()
        before, start, count = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu), time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            for call in calls:
                call()
            count += len(calls)
            torch.cuda.synchronize()
        return (pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) - before) / 1e3 / count
    return None


__all__ = [
    "KINDS",
    "Timing",
    "WEIGHT_DTYPES",
    "assert_masks_equal",
    "bench",
    "make_keep",
    "make_scale",
    "make_weight",
    "sample_arguments",
]
