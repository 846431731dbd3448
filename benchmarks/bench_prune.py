"""Seconds, joules and memory of whole pruning runs, on a model of a public shape with random weights and random tokens.

    python benchmarks/bench_prune.py --shape llama-2-7b --method fwanda --tokens 128x2048 --naive

Writes one JSON file, and prints its path as the last line of standard output.

A method that measures without a Hessian has a floor: the time that its FLOPs take at the card's own rate. With P
weights in the linear layers of the blocks, T tokens, windows of L tokens, V words and hidden size H it is

    F-Wanda   (4 P T + 3.5 attention + 2 head) / roof      forward pass, and backward pass without weight gradients;
              with --set fisher_samples=N the backward pass and the head count for N windows only
    Wanda     (2 P T + attention) / roof                   forward pass through the blocks
    attention = 2 L^2 x heads x head size x layers x windows (causal), head = 2 V H T
    roof      = median rate of 8192^3 products of random data over 2 s, measured in the same run (512^3 on a CPU)

The total of a run leaves out reading the text and loading or saving the model. The runs skip the check against Wanda,
so seconds and joules belong to the same work. "Cold" is the first run of the process and includes compilation; the runs
after it are "warm". With --naive the published pipeline in plain torch (lib/naive.py) runs warm on the same weights,
and both masks are compared.

With --engine streamed the weights of the decoder blocks lie in pinned RAM. --copies profiles how much of the time of
copies lies under computation. --against-resident also runs with all weights on the device, and compares the masks.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from lib import naive
from lib.copies import profiled_copies
from lib.decoding import decoding_energy
from lib.machine import machine, synchronize, this_device
from lib.masks import agreement, packed_masks
from lib.overhead import statistics_overhead
from lib.results import UNSHARED, slug, write
from lib.runs import joules_of, naive_run, our_run, spread, with_rates
from lib.shapes import SHAPES, PassFlops, build, gemm_roof, reinitialise
from torch import Tensor, nn

from fwanda_pruner import PruneConfig, UserError

PAPER_REPEATS = 5
ROOF_SECONDS = {"cuda": 2.0, "cpu": 0.2}
DTYPES = ("bfloat16", "float16", "float32")
PROFILED = 4  # micro-batches


def main(argv: list[str] | None = None) -> None:
    args, config = arguments(argv)
    result = measure(args, config)
    path = args.results / file_name(result)
    write(path, result)
    print("\n".join(table(result)))
    print(path)


def arguments(argv: list[str] | None) -> tuple[argparse.Namespace, PruneConfig]:
    """The command line, and the settings of the runs."""
    parser = command_line()
    args = parser.parse_args(argv)
    try:
        windows, length = map(int, args.tokens.split("x"))
        if windows < 1 or length < 1:
            raise ValueError
    except ValueError:
        parser.error(f"--tokens must be windows x length, e.g. 128x2048, got {args.tokens!r}")
    args.tokens_shape = windows, length
    args.repeats = PAPER_REPEATS if args.paper else args.repeats
    if args.repeats < args.naive:
        parser.error(f"--repeats must be at least {int(args.naive)}, got {args.repeats}")
    try:
        config = config_of(args)
    except UserError as error:
        parser.error(str(error))
    if args.naive and (config.nm or config.allocation != naive.ALLOCATIONS[config.method]):
        allocation = naive.ALLOCATIONS[config.method]
        parser.error(f"--naive has {config.method} with --allocation {allocation} and no pattern only")
    if config.engine == "streamed" and (args.naive or args.overhead or args.inference):
        parser.error("--naive, --overhead and --inference need all weights on the device: leave --engine streamed out")
    if config.engine != "streamed" and (args.copies or args.against_resident):
        parser.error("--copies and --against-resident need --engine streamed")
    try:
        args.results.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--results {args.results}: {error.strerror}")
    return args, config


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("--shape", required=True, choices=SHAPES, help="public shape of the model; its weights are random")
    option("--method", required=True, choices=naive.ALLOCATIONS, help="as of fwanda prune")
    option("--allocation", help="as of fwanda prune (default: the allocation of the method's paper)")
    option("--sparsity", default="0.5", help="share to remove (%(default)s)")
    option("--tokens", default="128x2048", metavar="SxL", help="windows x tokens in a window (%(default)s)")
    option("--blocks", type=int, metavar="N", help="decoder blocks of the model (default: all)")
    option("--dtype", default="bfloat16", choices=DTYPES, help="of the weights (%(default)s)")
    option("--seed", type=int, default=0, help="of weights and tokens (%(default)s)")
    option("--set", action="append", default=[], metavar="NAME=VALUE", help="any other setting of a run; repeatable")
    option("--engine", choices=("resident", "streamed"), help="as of fwanda prune (default: resident)")
    option("--segment", metavar="K", help="as of fwanda prune")
    option("--copies", action="store_true", help="profile how much of the time of copies lies under computation")
    option("--against-resident", action="store_true", help="also run with all weights on the device")
    option("--repeats", type=int, default=1, help="warm runs of each pipeline; 0: our cold run alone (%(default)s)")
    option("--paper", action="store_true", help=f"{PAPER_REPEATS} warm runs: mean and 95 %% confidence interval")
    option("--naive", action="store_true", help="also run the published pipeline in plain torch")
    option("--overhead", action="store_true", help="time the passes with and without statistics")
    option("--inference", action="store_true", help="measure joules per generated token, dense and pruned")
    option("--save", action="store_true", help="save the pruned model to a temporary folder")
    option("--results", type=Path, default=UNSHARED, metavar="DIR", help="folder of the JSON file (%(default)s)")
    return parser


def config_of(args: argparse.Namespace) -> PruneConfig:
    """The settings of the runs.

    Raises:
        UserError: a setting is unknown or has a value that is not allowed.
    """
    settings = {
        "method": args.method,
        "allocation": args.allocation or naive.ALLOCATIONS[args.method],
        "sparsity": args.sparsity,
        "seed": args.seed,
        "no_check": True,
        "energy": "net",
    }
    return PruneConfig.from_dict(settings | {name: value_of(text) for name, text in given_settings(args).items()})


def given_settings(args: argparse.Namespace) -> dict[str, str]:
    """The settings of --set NAME=VALUE, --engine and --segment, as text."""
    options = {name: getattr(args, name) for name in ("engine", "segment") if getattr(args, name)}
    return options | {name: value for name, _, value in (text.partition("=") for text in args.set)}


def value_of(text: str) -> object:
    """true and false as a bool, numbers as numbers, all else as it is."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def measure(args: argparse.Namespace, config: PruneConfig) -> dict:
    """Everything that the command line asks for, as JSON values."""
    device, dtype = this_device(), getattr(torch, args.dtype)
    tokens = random_tokens(args, device)
    say("roof")
    roof = gemm_roof(device, dtype, ROOF_SECONDS[device])
    model, build_seconds = built(args, device, config)
    flops = calibration_flops(model, tokens, config)
    result = facts(args, config, model, roof, flops) | {"build_seconds": build_seconds}
    if args.inference:
        say("decoding, dense")
        result["inference"] = {"dense": decoding_energy(model, tokens)}
    result["ours"] = our_runs(args, config, model, tokens, roof, flops)
    if args.inference:
        say("decoding, pruned")
        result["inference"]["pruned"] = decoding_energy(model, tokens)
    masks = packed_masks(weights_of(model), device) if args.naive or args.against_resident else []
    if args.copies:
        say("profile of the copies")
        micro_batch = (result["ours"]["cold"]["passes"] or {}).get("micro_batch", 1)
        windows, fixed = tokens[: PROFILED * micro_batch], replace(config, micro_batch=str(micro_batch))
        result["copies"] = profiled_copies(model, windows, fixed)
    if args.overhead:
        say("statistics overhead")
        reinitialise(model, args.seed)
        result["overhead"] = statistics_overhead(model, tokens, config)
    del model
    torch.compiler.reset()  # compiled blocks would keep the model alive
    gc.collect()
    if args.against_resident:
        result["resident"] = resident_runs(args, config, masks, tokens, roof, flops)
        ours, theirs = (result[key]["spread"]["total_seconds"]["mean"] for key in ("ours", "resident"))
        result["times_resident"] = ours / theirs
    if args.naive:
        result["naive"] = naive_runs(args, config, masks, tokens, roof, flops)
        theirs, ours = (result[key]["spread"]["total_seconds"]["mean"] for key in ("naive", "ours"))
        result["speedup"] = theirs / ours
    return result


def random_tokens(args: argparse.Namespace, device: str) -> Tensor:
    """[S, L] int64 token ids."""
    generator = torch.Generator().manual_seed(args.seed)
    return torch.randint(SHAPES[args.shape][1]["vocab_size"], args.tokens_shape, generator=generator).to(device)


def built(args: argparse.Namespace, device: str, config: PruneConfig) -> tuple[nn.Module, float]:
    """A new model on the device, and the seconds that building it took."""
    held_bytes = 0
    if device == "cuda":
        torch.cuda.empty_cache()
        held_bytes = torch.cuda.memory_allocated()
    say(f"building {args.shape}, {held_bytes / 1e9:.1f} GB held before")
    start = time.perf_counter()
    streamed = config.engine == "streamed"
    model = build(args.shape, getattr(torch, args.dtype), device, args.seed, args.blocks, streamed=streamed)
    synchronize(device)
    return model, time.perf_counter() - start


def weights_of(model: nn.Module) -> list[Tensor]:
    return [module.weight for module in naive.linears(model).values()]


def calibration_flops(model: nn.Module, tokens: Tensor, config: PruneConfig) -> float | None:
    """FLOPs of calibration; None for a method that reads no text or measures Hessians."""
    if config.method not in ("wanda", "fwanda"):
        return None
    weights, (windows, length) = sum(weight.numel() for weight in weights_of(model)), tokens.shape
    forward = PassFlops.of(model, weights, windows, length).forward
    if not config.needs_fisher:
        return forward
    fisher = PassFlops.of(model, weights, replace(config, nsamples=windows).fisher_count, length)
    return forward + fisher.forward_backward - fisher.forward


def facts(args, config: PruneConfig, model: nn.Module, roof: dict, flops: float | None) -> dict:
    """What was run, and on what machine."""
    return {
        "kind": "prune",
        **machine(this_device()),
        "transformers": transformers.__version__,
        "shape": args.shape + (f", {args.blocks} blocks" if args.blocks else ""),
        "method": config.method,
        "allocation": config.allocation,
        "sparsity": config.sparsity,
        "tokens": args.tokens,
        "dtype": args.dtype,
        "seed": args.seed,
        "settings": given_settings(args),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "roof": roof,
        "flops": flops,
        "floor_seconds": None if flops is None else flops / roof["tflop_per_s"] / 1e12,
    }


def our_runs(args, config: PruneConfig, model: nn.Module, tokens: Tensor, roof: dict, flops: float | None) -> dict:
    """A cold run and the warm runs, each on fresh weights."""
    runs = []
    for index in range(1 + args.repeats):
        say(f"warm run {index} of {args.repeats}" if index else "cold run")
        reinitialise(model, args.seed)
        synchronize(tokens.device.type)
        save_in = args.results if args.save and index and index == args.repeats else None
        runs.append(with_rates(our_run(model, tokens, config, save_in), flops, roof))
    cold, *warm = runs
    return {"cold": cold, "warm": warm, "spread": spread(warm or [cold])}


def resident_runs(args, config: PruneConfig, masks: list, tokens: Tensor, roof: dict, flops: float | None) -> dict:
    """Runs of the same settings with all weights on the device, and the share of equal masks."""
    config = replace(config, engine="resident", segment=None)
    model, _ = built(args, tokens.device.type, config)
    return our_runs(args, config, model, tokens, roof, flops) | {"masks_agree": masks_agree(model, masks)}


def naive_runs(args, config: PruneConfig, masks: list, tokens: Tensor, roof: dict, flops: float | None) -> dict:
    """Warm runs of the published pipeline on a new model with the same weights."""
    model, _ = built(args, tokens.device.type, config)
    warm_up_backward = naive.needs_fisher(config.method)
    naive.calibrate(model, tokens[:1], naive.linears(model), backward=warm_up_backward)
    runs = []
    for index in range(args.repeats):
        say(f"plain torch run {index + 1} of {args.repeats}")
        reinitialise(model, args.seed)
        runs.append(with_rates(naive_run(model, tokens, config.method, float(config.sparsity)), flops, roof))
    return {"warm": runs, "spread": spread(runs), "masks_agree": masks_agree(model, masks)}


def masks_agree(model: nn.Module, masks: list[Tensor]) -> float:
    """Share of the weights that a model and packed masks keep or remove alike."""
    return agreement(packed_masks(weights_of(model)), masks)


def file_name(result: dict) -> str:
    """One name for each shape, setting, card and day."""
    keys = ("shape", "method", "allocation", "sparsity", "tokens", "dtype")
    settings = [f"{name} {value}" for name, value in result["settings"].items()]
    return f"prune-{slug(*(result[key] for key in keys), *settings, result['card'])}-{result['date']}.json"


def table(result: dict) -> list[str]:
    """Lines of text: stages and figures down; cold, warm (the last run) and plain torch across."""
    columns = {"cold": result["ours"]["cold"]}
    if result["ours"]["warm"]:
        columns["warm"] = result["ours"]["warm"][-1]
    if "resident" in result:
        columns["resident"] = (result["resident"]["warm"] or [result["resident"]["cold"]])[-1]
    if "naive" in result:
        columns["plain torch"] = result["naive"]["warm"][-1]
    rows = [["", *columns]]
    rows += [[name, *(number(figure(run)) for run in columns.values())] for name, figure in figures(columns).items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head = "{shape}, {method} {allocation}, {sparsity} removed, {tokens} tokens, {dtype}; {card}, torch {torch}, {date}"
    lines = [head.format_map(result)]
    lines += ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    if "naive" in result:
        lines.append(f"speedup {result['speedup']:.2f}x, masks agree {100 * result['naive']['masks_agree']:.3f} %")
    if "resident" in result:
        agree = 100 * result["resident"]["masks_agree"]
        lines.append(f"{result['times_resident']:.2f} times the resident engine, masks agree {agree:.3f} %")
    for way, copies in result.get("copies", {}).items():
        share = "-" if copies["under_kernels"] is None else f"{100 * copies['under_kernels']:.1f} %"
        lines.append(f"copies {way.replace('_', ' ')}: {copies['seconds']:.3f} s, {share} under computation")
    if "overhead" in result:
        lines.append("statistics overhead {percent:.1f} %".format_map(result["overhead"]))
    return lines


def figures(columns: dict[str, dict]) -> dict:
    """Name of a line -> function from a run to its figure."""
    stages = dict.fromkeys(stage for run in columns.values() for stage in run["seconds"])
    return {f"{stage}, s": lambda run, stage=stage: run["seconds"].get(stage) for stage in stages} | {
        "total, s": lambda run: run["total_seconds"],
        "times the floor": lambda run: run["times_floor"],
        "TFLOP/s": lambda run: run["tflop_per_s"],
        "peak memory, GB": lambda run: run["peak_memory_bytes"] and run["peak_memory_bytes"] / 1e9,
        "loaded, GB": lambda run: run.get("bytes_loaded") and run["bytes_loaded"] / 1e9,
        "gross, J": lambda run: joules_of(run, "gross_joules"),
        "net, J": lambda run: joules_of(run, "net_joules"),
    }


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
