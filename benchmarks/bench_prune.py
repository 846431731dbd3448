"""Seconds, joules and memory of whole pruning runs, on a model of a public shape with random weights and random tokens.

    python benchmarks/bench_prune.py --shape llama-2-7b --method fwanda --tokens 128x2048 --naive

Writes one JSON file; its path is the last line of standard output. With P weights in the linear layers of the blocks, T
tokens, windows of L tokens, V words and hidden size H, the floor of a method that measures without a Hessian is

    F-Wanda   (4 P T + 3.5 attention + 2 head) / roof      forward, and activation-only backward from the loss
    Wanda     (2 P T + attention) / roof                   forward through the blocks
    attention = 2 L^2 x heads x head size x layers x windows (causal), head = 2 V H T
    roof      = median rate of 8192^3 products of random data, sustained for 2 s in the same run (512^3 on a CPU)

The total of a run is calibrate + budgets + prune: reading the text and building or saving the model are left out, and
the runs go without the check against Wanda, so that the joules are of the same work.
"Cold" is the first run of the process, compilation included; "warm" the runs after it. The plain-torch pipeline
(--naive, see prune_naive.py) runs warm on equal weights, and its masks are compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import re
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import prune_naive
import torch
import transformers
from conftest import RESULTS, machine
from prune_extras import decoding_energy, masks_agree, packed_masks, statistics_overhead
from prune_shapes import SHAPES, Work, build, gemm_roof, reinitialise
from repeats import Spread

import fwanda_pruner
from fwanda_pruner import PruneConfig
from fwanda_pruner.config import DTYPES, METHODS
from fwanda_pruner.errors import UserError
from fwanda_pruner.model.targets import find_targets
from fwanda_pruner.run.energy import EnergyMeter

PAPER_REPEATS = 5
ROOF_SECONDS = {"cuda": 2.0, "cpu": 0.2}
JOULES = ("gross_joules", "net_joules", "sampled_net_joules")
OUTSIDE = ("text", "load", "save", "eval_dense", "eval_pruned")


def main() -> None:
    args, config = arguments()
    result = Bench(args, config).run()
    path = args.results / file_name(result)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(table(result)))
    print(path)


def arguments() -> tuple[argparse.Namespace, PruneConfig]:
    """The command line, and the configuration of the runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", required=True, choices=SHAPES, help="of the model, whose weights are random")
    parser.add_argument("--method", required=True, choices=METHODS, help="as of fwanda prune")
    parser.add_argument("--allocation", help="as of fwanda prune (default: that of the method)")
    parser.add_argument("--sparsity", default="0.5", help="share to remove (%(default)s)")
    parser.add_argument("--tokens", default="128x2048", metavar="SxL", help="windows x their length (%(default)s)")
    parser.add_argument("--blocks", type=int, metavar="N", help="decoder blocks of the model (default: all)")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of the weights (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any other setting of a run")
    parser.add_argument(
        "--repeats", type=int, default=1, help="warm runs of each pipeline, 0 for ours cold alone (%(default)s)"
    )
    parser.add_argument("--paper", action="store_true", help=f"{PAPER_REPEATS} warm runs: mean and 95 %% CI")
    parser.add_argument("--naive", action="store_true", help="also run the published pipeline in plain torch")
    parser.add_argument("--overhead", action="store_true", help="time the passes with and without statistics")
    parser.add_argument("--inference", action="store_true", help="joules per generated token, dense and pruned")
    parser.add_argument("--save", action="store_true", help="save the pruned model to a temporary folder")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="folder of the JSON (%(default)s)")
    args = parser.parse_args()
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", args.tokens):
        parser.error(f"--tokens must be windows x length, e.g. 128x2048, got {args.tokens!r}")
    args.repeats = PAPER_REPEATS if args.paper else args.repeats
    if args.repeats < args.naive:
        parser.error(f"--repeats must be at least {int(args.naive)}, got {args.repeats}")
    try:
        others = dict(map(setting, args.set))
        config = PruneConfig(args.method, args.allocation, args.sparsity, seed=args.seed, no_check=True, **others)
        config = config.resolved()
    except (UserError, ValueError, TypeError) as error:
        parser.error(str(error))
    if args.naive and (config.nm or config.allocation != prune_naive.ALLOCATIONS[config.method]):
        allocation = prune_naive.ALLOCATIONS[config.method]
        parser.error(f"--naive has {config.method} with --allocation {allocation} and no pattern only")
    try:
        args.results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--results {args.results}: {error.strerror}")
    return args, config


def setting(text: str) -> tuple[str, object]:
    """NAME=VALUE as a field of PruneConfig and its value."""
    name, _, value = text.partition("=")
    kinds = {f.name: f.metadata["type"] for f in dataclasses.fields(PruneConfig)}
    if name not in kinds:
        raise ValueError(f"--set: unknown setting {name!r}")
    if kinds[name] is bool and value not in ("true", "false"):
        raise ValueError(f"--set {name} must be true or false, got {value!r}")
    return name, value == "true" if kinds[name] is bool else kinds[name](value)


class Bench:
    """All measurements of one command line."""

    def __init__(self, args: argparse.Namespace, config: PruneConfig):
        self.args, self.config = args, config
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = getattr(torch, args.dtype)
        windows, length = map(int, args.tokens.split("x"))
        generator = torch.Generator().manual_seed(args.seed)
        vocabulary = SHAPES[args.shape][1]["vocab_size"]
        self.tokens = torch.randint(vocabulary, (windows, length), generator=generator).to(self.device)

    def run(self) -> dict:
        """Everything that was asked for, as JSON values."""
        args, config = self.args, self.config
        say("roof")
        self.roof = gemm_roof(self.device, self.dtype, ROOF_SECONDS[self.device])
        model, build_seconds = self.built()
        self.work = self.flops(model)
        result = self.facts(model) | {"build_seconds": build_seconds}
        if args.inference:
            say("decoding, dense")
            result["inference"] = {"dense": decoding_energy(model, self.tokens)}
        say("cold run")
        ours = {"cold": self.ours(model), "warm": []}
        for index in range(args.repeats):
            say(f"warm run {index + 1} of {args.repeats}")
            ours["warm"].append(self.ours(model, save=args.save and index + 1 == args.repeats))
        result["ours"] = ours | {"spread": spread(ours["warm"] or [ours["cold"]])}
        if args.inference:
            say("decoding, pruned")
            result["inference"]["pruned"] = decoding_energy(model, self.tokens)
        masks = packed_masks(find_targets(model)[0]) if args.naive else None
        if args.overhead:
            say("statistics overhead")
            reinitialise(model, args.seed)
            result["overhead"] = statistics_overhead(model, self.tokens, config)
        if args.naive:
            del model
            result["naive"] = self.naive(masks)
            seconds = [result[key]["spread"]["total_seconds"]["mean"] for key in ("naive", "ours")]
            result["speedup"] = seconds[0] / seconds[1]
        return result

    def built(self):
        """A new model on the device, and the seconds that it took."""
        held = 0
        if self.device == "cuda":
            torch.cuda.empty_cache()
            held = torch.cuda.memory_allocated()
        say(f"building {self.args.shape}, {held / 1e9:.1f} GB held before")
        start = time.perf_counter()
        model = build(self.args.shape, self.dtype, self.device, self.args.seed, self.args.blocks)
        synchronize(self.device)
        return model, time.perf_counter() - start

    def flops(self, model) -> float | None:
        """Of calibration; None for a method that reads no text, or measures Hessians."""
        facts = self.config.facts
        if facts.updates_weights or not facts.scores_inputs:
            return None
        weights = sum(target.weight.numel() for target in find_targets(model)[0])
        work = Work.of(model, weights, *self.tokens.shape)
        return work.forward_backward if self.config.needs_fisher else work.forward

    def facts(self, model) -> dict:
        """What was run, and on what."""
        floor = None if self.work is None else self.work / self.roof["tflop_per_s"] / 1e12
        return {
            "kind": "prune",
            **machine(self.device),
            "transformers": transformers.__version__,
            "shape": self.args.shape + (f", {self.args.blocks} blocks" if self.args.blocks else ""),
            "method": self.config.method,
            "allocation": self.config.allocation,
            "sparsity": self.config.sparsity,
            "tokens": self.args.tokens,
            "dtype": self.args.dtype,
            "seed": self.args.seed,
            "settings": dict(map(setting, self.args.set)),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "roof": self.roof,
            "flops": self.work,
            "floor_seconds": floor,
        }

    def ours(self, model, *, save: bool = False) -> dict:
        """One run of fwanda_pruner on fresh weights."""
        reinitialise(model, self.args.seed)
        synchronize(self.device)
        report = fwanda_pruner.prune(model, None, config=self.config, calibration=self.tokens)
        if save:
            with tempfile.TemporaryDirectory(dir=self.args.results) as folder:
                fwanda_pruner.save_pruned(model, None, report, Path(folder) / "model")
        facts = {"passes": report.passes, "warnings": report.warnings}
        return self.measured(report.seconds, report.peak_memory_bytes, report.energy_details) | facts

    def naive(self, masks: list) -> dict:
        """Warm runs of the published pipeline on a new model with the same weights."""
        torch.compiler.reset()  # compiled blocks would keep the model that is gone
        gc.collect()
        model, _ = self.built()
        linears = prune_naive.linears(model)
        prune_naive.calibrate(model, self.tokens[:1], linears, backward=self.config.needs_fisher)  # warms up
        runs = []
        for index in range(self.args.repeats):
            say(f"plain torch run {index + 1} of {self.args.repeats}")
            reinitialise(model, self.args.seed)
            runs.append(self.naive_run(model))
        return {"warm": runs, "spread": spread(runs), "masks_agree": masks_agree(find_targets(model)[0], masks)}

    def naive_run(self, model) -> dict:
        seconds: dict[str, float] = {}
        synchronize(self.device)
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

        @contextmanager
        def phase(name: str):
            start = time.perf_counter()
            with meter.phase(name):
                yield
                synchronize(self.device)
            seconds[name] = time.perf_counter() - start

        with EnergyMeter(self.device, protocol="net") as meter:
            prune_naive.prune(model, self.tokens, self.config.method, float(self.config.removed), phase)
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else None
        return self.measured(seconds, peak, meter.to_dict())

    def measured(self, seconds: dict[str, float], peak: int | None, energy: dict) -> dict:
        """The figures of one run."""
        total = sum(value for phase, value in seconds.items() if phase not in OUTSIDE)
        rate = self.work / seconds["calibrate"] / 1e12 if self.work is not None else None
        return {
            "seconds": dict(seconds),
            "total_seconds": total,
            "peak_memory_bytes": peak,
            "energy": energy,
            "tflop_per_s": rate,
            "share_of_roof": None if rate is None else rate / self.roof["tflop_per_s"],
            "times_floor": None if rate is None else total * self.roof["tflop_per_s"] * 1e12 / self.work,
        }


def spread(runs: list[dict]) -> dict:
    """Mean, deviation and confidence interval of the totals; joules None where a run has none."""
    joules = {key: [joules_of(run, key) for run in runs] for key in JOULES}
    figures = {"total_seconds": [run["total_seconds"] for run in runs], **joules}
    return {key: None if None in x else dataclasses.asdict(Spread.of(x)) for key, x in figures.items()}


def joules_of(run: dict, key: str) -> float | None:
    total = run["energy"]["total"]
    return None if isinstance(total, str) else total.get(key)


def file_name(result: dict) -> str:
    """One name for each shape, setting, card and day."""
    keys = ("shape", "method", "allocation", "sparsity", "tokens", "dtype")
    settings = [f"{name} {value}" for name, value in result["settings"].items()]
    words = [result[key] for key in keys] + settings + [result["card"]]
    slug = re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower()).strip("-")
    return f"prune-{slug}-{result['date']}.json"


def table(result: dict) -> list[str]:
    """Lines: phases and figures down, cold, warm (the last run) and plain torch across."""
    columns = {"cold": result["ours"]["cold"]}
    if result["ours"]["warm"]:
        columns["warm"] = result["ours"]["warm"][-1]
    if "naive" in result:
        columns["plain torch"] = result["naive"]["warm"][-1]
    phases = dict.fromkeys(phase for run in columns.values() for phase in run["seconds"])
    rows = [["", *columns]]
    rows += [[f"{phase}, s", *(number(run["seconds"].get(phase)) for run in columns.values())] for phase in phases]
    figures = {
        "total, s": lambda run: run["total_seconds"],
        "times the floor": lambda run: run["times_floor"],
        "TFLOP/s": lambda run: run["tflop_per_s"],
        "peak memory, GB": lambda run: run["peak_memory_bytes"] and run["peak_memory_bytes"] / 1e9,
        "gross, J": lambda run: joules_of(run, "gross_joules"),
        "net, J": lambda run: joules_of(run, "net_joules"),
    }
    rows += [[name, *(number(figure(run)) for run in columns.values())] for name, figure in figures.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head = "{shape}, {method} {allocation}, {sparsity} removed, {tokens} tokens, {dtype}; {card}, torch {torch}, {date}"
    lines = [head.format_map(result)]
    lines += ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    if "naive" in result:
        lines.append(f"speedup {result['speedup']:.2f}x, masks agree {100 * result['naive']['masks_agree']:.3f} %")
    if "overhead" in result:
        lines.append("statistics overhead {percent:.1f} %".format_map(result["overhead"]))
    return lines


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
