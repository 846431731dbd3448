"""Seconds, peak memory and agreement of runs on several GPUs, against one GPU in the same call.

    torchrun --nproc-per-node 4 benchmarks/bench_scaling.py
    torchrun --nproc-per-node 2 benchmarks/bench_scaling.py --cases fwanda:llama-2-7b sharded:llama-2-13b

A case is KIND:SHAPE. First rank 0 runs all cases alone, then all ranks run them together. Each run follows a short one
that compiles what it needs. Weights and tokens are random; those of all ranks and of the run alone are the same.

    fwanda     calibration on all windows, two in a pass, compiled; then masks from the statistics of the run alone
    sparsegpt  the walk through the blocks
    auto       a whole run of F-Wanda with --allocation auto, not compiled
    sharded    calibration on all windows with the weights divided over the ranks; alone where one GPU holds the model.
               Both are not compiled. The weights are made on the shards, so they differ from those of the run alone

The difference of statistics from those of the run alone is that of 16 windows, uncompiled and deterministic: attention
that is not deterministic changes the gradients from run to run. Efficiency is seconds alone / (ranks x seconds
together). One JSON file has all cases, and is written after each of them: its path is the last line of standard
output.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from lib import scaling_cases
from lib.cost import Engine, Text
from lib.machine import machine, synchronize
from lib.masks import agreement, packed_masks
from lib.naive import linears
from lib.rates import CARDS
from lib.results import UNSHARED, slug, write
from lib.scaling_cases import SETTINGS, Case
from lib.scaling_results import table
from lib.shapes import SHAPES, build, reinitialise
from lib.sharded_shapes import build_sharded
from torch import Tensor, nn

import fwanda_pruner
from fwanda_pruner import PruneConfig, Statistics
from fwanda_pruner.engine.engine import make_engine
from fwanda_pruner.engine.ranks import GROUPS, Ranks
from fwanda_pruner.measure.statistics import measure_statistics
from fwanda_pruner.model.targets import find_targets
from fwanda_pruner.report.record import Report
from fwanda_pruner.stage_names import pruning_seconds

CASES = (
    "fwanda:llama-2-7b", "fwanda:llama-2-13b", "sparsegpt:llama-2-7b", "sharded:llama-2-13b", "sharded:llama-3-70b",
    "auto:llama-2-7b",
)  # fmt: skip
SEED = 0


@dataclass(frozen=True)
class Run:
    """What one process found.

    Attributes:
        seconds: of the stage.
        peak: bytes of memory; None on a CPU.
        statistics: of all windows.
        repeatable: statistics of a few windows, whose bits are the same in every run of one process.
        masks: as bits.
    """

    seconds: float
    peak: int | None
    statistics: Statistics | None = None
    repeatable: Statistics | None = None
    masks: list[Tensor] | None = None


class Bench:
    """The cases of one process.

    Args:
        args: of the command line.
        device: of this process.
        ranks: number of processes.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device, ranks: int):
        self.args, self.device, self.ranks = args, device, ranks
        self.dtype = getattr(torch, args.dtype)
        windows, length = args.tokens
        self.text = Text(windows, length, windows)
        self.card = CARDS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None

    def alone(self, case: Case) -> Run | None:
        """A case on this process; None if one GPU does not hold its model."""
        if case.kind == "sharded" and not self.fits(case, 1):
            return None
        model = build(case.shape, self.dtype, self.device.type, SEED)
        return self.warm_run(case, model, lambda: reinitialise(model, SEED))

    def together(self, case: Case, statistics: Statistics | None) -> Run:
        """A case on all ranks; `statistics` of the run alone give the masks."""
        if case.kind == "sharded":
            return self.warm_run(case, build_sharded(case.shape, self.dtype, self.device, SEED), lambda: None)
        model = build(case.shape, self.dtype, self.device.type, SEED)
        return self.warm_run(case, model, lambda: reinitialise(model, SEED), statistics)

    def warm_run(
        self, case: Case, model: nn.Module, renew: Callable[[], None], statistics: Statistics | None = None
    ) -> Run:
        """A short run, then the one that counts. `renew` brings the first weights back."""
        tokens = self.tokens(case)
        self.run(case, model, tokens[: self.warm_up(case)])
        renew()
        self.reset_peak()
        Ranks.current().gather(None)  # all ranks begin together
        seconds, found = self.run(case, model, tokens)
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        repeatable = self.repeatable(case, model, tokens) if case.kind == "fwanda" else None
        if case.kind == "fwanda":  # masks are selected from the same statistics on one rank and on several
            self.pruned(case, model, tokens, statistics or found)
        masks = None if case.kind == "sharded" else packed_masks(m.weight for m in linears(model).values())
        return Run(seconds, peak, found, repeatable, masks)

    def warm_up(self, case: Case) -> int:
        """Windows of the short run: two passes of each group, of which the second is compiled."""
        return 2 * int(SETTINGS[case.kind].get("micro_batch", 1)) * (GROUPS if dist.is_initialized() else 4)

    def run(self, case: Case, model: nn.Module, tokens: Tensor) -> tuple[float, Statistics | None]:
        """Seconds of the stage that the case times, and its statistics."""
        if not case.measures:
            report = self.pruned(case, model, tokens)
            return (report.seconds["prune"] if case.kind == "sparsegpt" else pruning_seconds(report.seconds)), None
        synchronize(self.device.type)
        start = time.perf_counter()
        found = self.measured(case, model, tokens)
        synchronize(self.device.type)
        return time.perf_counter() - start, found

    def measured(self, case: Case, model: nn.Module, tokens: Tensor, **changes) -> Statistics:
        config = PruneConfig(**self.settings(case) | changes)
        return measure_statistics(make_engine(model, find_targets(model)[0], config, progress=False), tokens)

    def repeatable(self, case: Case, model: nn.Module, tokens: Tensor) -> Statistics:
        """Statistics of one window of each group, without what changes them from run to run."""
        torch.use_deterministic_algorithms(True)
        try:
            return self.measured(case, model, tokens[:GROUPS], compile="off", micro_batch="1")
        finally:
            torch.use_deterministic_algorithms(False)

    def pruned(self, case: Case, model: nn.Module, tokens: Tensor, statistics: Statistics | None = None) -> Report:
        settings = self.settings(case) | {"no_check": True, "fisher_samples": "all" if case.measures else "96"}
        text = {"calibration": tokens} if statistics is None else {"statistics": statistics}
        return fwanda_pruner.prune(model, **text, progress=False, **settings)

    def settings(self, case: Case) -> dict:
        compile = {"compile": "off"} if self.device.type == "cpu" else {}  # there it takes longer than it saves
        return SETTINGS[case.kind] | compile | self.sharded(case)

    def sharded(self, case: Case) -> dict:
        """Settings of the sharded engine, where it runs."""
        if case.kind != "sharded" or not dist.is_initialized():
            return {}
        again = "on" if self.engine(case, self.ranks).checkpointing else "off"
        return {"engine": "sharded", "checkpointing": again}

    def tokens(self, case: Case) -> Tensor:
        """[S, L] int64."""
        generator = torch.Generator().manual_seed(SEED)
        vocab = SHAPES[case.shape][1]["vocab_size"]
        return torch.randint(vocab, self.args.tokens, generator=generator).to(self.device)

    def reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def free(self) -> None:
        """Frees the memory of a case that has ended."""
        torch.compiler.reset()  # compiled blocks would keep the model alive
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def engine(self, case: Case, ranks: int) -> Engine:
        """How so many ranks run a case."""
        return scaling_cases.engine_of(case, self.card, ranks, self.text)

    def fits(self, case: Case, ranks: int) -> bool:
        """Whether each GPU has the memory."""
        return scaling_cases.fits(case, self.card, self.engine(case, ranks), self.text)


def main() -> None:
    args = arguments()
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # as deterministic products demand; read by CUDA's start
    rank, ranks, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    cuda = torch.cuda.is_available() and not args.cpu
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    bench = Bench(args, device, ranks)
    alone: dict[Case, Run | None] = {}
    if rank == 0:  # the others wait for it in init_process_group()
        for case in args.cases:
            say(f"{case.kind} {case.shape}, alone")
            alone[case] = bench.alone(case)
            bench.free()
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(hours=1))
    result = facts(args, device, ranks)
    path = args.results / f"scaling-{slug(ranks, result['card'])}-{result['date']}.json"
    for case in args.cases:
        row = compared(bench, case, alone.get(case))
        if rank == 0:
            result["cases"].append(row)
            write(path, result)
    Ranks.current().gather(None)
    dist.destroy_process_group()
    if rank == 0:
        print(f"{table(result)}\n{path}")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    cases = [Case.parse(text) for text in CASES]
    option(
        "--cases", type=Case.parse, nargs="+", default=cases, metavar="KIND:SHAPE", help=f"default: {' '.join(CASES)}"
    )
    option("--tokens", type=windows_of, default=(128, 2048), metavar="SxL", help="windows x tokens (128x2048)")
    option(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the weights (%(default)s)"
    )
    option("--cpu", action="store_true", help="run on the CPU")
    option("--results", type=Path, default=UNSHARED, metavar="DIR", help="folder of the JSON file (%(default)s)")
    args = parser.parse_args(given)
    if not dist.is_torchelastic_launched():
        parser.error("start it by torchrun --nproc-per-node N")
    args.results.mkdir(parents=True, exist_ok=True)
    return args


def windows_of(text: str) -> tuple[int, int]:
    try:
        windows, length = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be windows x length, e.g. 128x2048, got {text!r}") from None
    return windows, length


def facts(args: argparse.Namespace, device: torch.device, ranks: int) -> dict:
    tokens = "x".join(map(str, args.tokens))
    found = {"kind": "scaling", **machine(device.type), "transformers": transformers.__version__, "gpus": ranks}
    return found | {"nccl": nccl_version(device), "tokens": tokens, "dtype": args.dtype, "seed": SEED, "cases": []}


def nccl_version(device: torch.device) -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None


def compared(bench: Bench, case: Case, alone: Run | None) -> dict | None:
    """Runs a case on all ranks; its row of the result, on rank 0."""
    ranks = Ranks.current()
    row = {"case": case.kind, "shape": case.shape, "gpus": ranks.size}
    if case.kind == "sharded" and (why := unable(bench, case, ranks.size)):
        return row | {"left_out": why}
    if ranks.first:
        say(f"{case.kind} {case.shape}, {ranks.size} ranks")
    parts = ranks.share(lambda: alone.statistics.to_parts() if alone and alone.statistics else None)
    together = bench.together(case, None if parts is None else Statistics.of_parts(*parts).to(bench.device))
    bench.free()
    slowest, peaks = max(ranks.gather(together.seconds)), ranks.gather(together.peak)
    digests = ranks.gather((digest(statistics_of(together)), digest(together.masks)))
    if not ranks.first:
        return None
    peak = None if together.peak is None else max(peaks)
    row |= {"together": {"seconds": slowest, "peak_memory_bytes": peak}}
    if together.statistics is not None:
        row["micro_batch"] = together.statistics.passes["micro_batch"]
    if alone is not None:
        row |= {"alone": {"seconds": alone.seconds, "peak_memory_bytes": alone.peak}}
        row["efficiency"] = alone.seconds / (ranks.size * slowest)
    return row | {"checks": checks(case, alone, together, digests)}


def unable(bench: Bench, case: Case, ranks: int) -> str | None:
    """Why a sharded case cannot run."""
    if ranks < 2:
        return "one rank has nothing to divide"
    return None if bench.fits(case, ranks) else "the shards and activations do not fit"


def checks(case: Case, alone: Run | None, together: Run, digests: list[tuple[str, str]]) -> dict:
    """Whether all ranks found the same, and how far that is from the run alone."""
    found: dict = {"statistics_equal_on_all_ranks": same(first for first, _ in digests) if case.measures else None}
    found["masks_equal_on_all_ranks"] = None if case.kind == "sharded" else same(last for _, last in digests)
    if alone is None or case.kind == "sharded":
        return found
    if case.kind == "fwanda":
        found["largest_relative_difference_of_statistics"] = difference(alone.repeatable, together.repeatable)
        found["masks_of_equal_statistics_equal"] = digest(alone.masks) == digests[0][1]
    else:
        found["share_of_equal_masks"] = agreement(alone.masks, together.masks)
    return found


def same(values: Iterable[str]) -> bool:
    return len(set(values)) == 1


def statistics_of(run: Run) -> list[Tensor]:
    return [] if run.statistics is None else list(run.statistics.to_parts()[0].values())


def digest(tensors: list[Tensor] | None) -> str:
    """sha256 of the bits of tensors."""
    found = hashlib.sha256()
    for tensor in tensors or []:
        found.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def difference(alone: Statistics, together: Statistics) -> float:
    """The largest relative difference of a vector of sums: |a - b| / |a|."""
    pairs = zip(*(statistics.to_parts()[0].values() for statistics in (alone, together)), strict=True)
    return max(float((a.double() - b.double()).norm() / a.double().norm()) for a, b in pairs)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
