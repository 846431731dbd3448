"""Seconds and memory of pruning on several GPUs of a machine, with each rank's weights whole or sharded.

    torchrun --nproc-per-node 2 benchmarks/bench_ranks.py --shape llama-2-13b --method fwanda --engine sharded

The model has a public shape and random weights, the text is random tokens. Compiling is off, so that engines can be
compared: run both in the same session. Rank 0 writes one JSON file, and prints its path as the last line of standard
output. Seconds are those of rank 0; memory is that of the rank that used most. `weight_bound_bytes` is what the weights
of a sharded model should take: the share of a rank, 3 whole blocks, and all that lies outside the blocks.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from lib import naive
from lib.machine import machine, this_device
from lib.results import UNSHARED, slug, write
from lib.runs import our_run
from lib.shapes import SHAPES, build, reinitialise
from torch import nn
from torch.distributed.tensor import DTensor

from fwanda_pruner import PruneConfig
from fwanda_pruner.model.placement import move_the_rest, parameters_of_the_rest
from fwanda_pruner.model.sharding import wrap_
from fwanda_pruner.model.targets import find_blocks


def main() -> None:
    args = command_line().parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    kind = this_device()
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    make = sharded if args.engine == "sharded" else whole
    model = make(args, device)
    result = facts(args, model) | {"runs": runs(args, model, device)}
    if dist.get_rank() == 0:
        peak, seconds = (result["runs"][-1][key] for key in ("peak_memory_bytes", "total_seconds"))
        say(f"{args.engine}, {result['ranks']} ranks: {seconds:.1f} s, peak {peak / 1e9:.1f} GB a card")
        say(f"weights a card and 3 blocks: {result['weight_bound_bytes'] / 1e9:.1f} GB")
        keys = ("shape", "method", "tokens", "engine", "ranks")
        path = args.results / f"ranks-{slug(*(str(result[key]) for key in keys), result['card'])}-{result['date']}.json"
        write(path, result)
        print(path)
    dist.barrier()
    dist.destroy_process_group()


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("--shape", required=True, choices=SHAPES, help="public shape of the model; its weights are random")
    option("--method", default="fwanda", choices=naive.ALLOCATIONS, help="as of fwanda prune (%(default)s)")
    option("--engine", default="sharded", choices=("resident", "sharded"), help="as of fwanda prune (%(default)s)")
    option("--offload", action="store_true", help="keep the shares of a sharded model in RAM")
    option("--tokens", default="128x2048", metavar="SxL", help="windows x tokens in a window (%(default)s)")
    option("--blocks", type=int, metavar="N", help="decoder blocks of the model (default: all)")
    option("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the weights (%(default)s)")
    option("--micro-batch", default="auto", metavar="N", help="as of fwanda prune (%(default)s)")
    option("--repeats", type=int, default=2, metavar="N", help="runs; the first is cold (%(default)s)")
    option("--seed", type=int, default=0, help="of weights and tokens (%(default)s)")
    option("--save", action="store_true", help="save the pruned model to a temporary folder after the last run")
    option("--results", type=Path, default=UNSHARED, metavar="DIR", help="folder of the JSON file (%(default)s)")
    return parser


def shape(args: argparse.Namespace) -> tuple[str, torch.dtype]:
    return args.shape, getattr(torch, args.dtype)


def whole(args: argparse.Namespace, device: torch.device) -> nn.Module:
    return build(*shape(args), str(device), args.seed, args.blocks)


def sharded(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """A model with random weights, none of which was ever whole."""
    model = build(*shape(args), "meta", args.seed, args.blocks)
    wrap_(model, device, offload=args.offload)
    model.to_empty(device="cpu" if args.offload else device)
    move_the_rest(model, device)
    rotary = model.model.rotary_emb  # its buffers have values of their own
    model.model.rotary_emb = type(rotary)(model.config).to(device)
    return model


@torch.no_grad()
def refill(args: argparse.Namespace, model: nn.Module) -> None:
    """Sets fresh weights in place: as reinitialise(), and shares of them by the seed and the rank."""
    if args.engine == "resident":
        reinitialise(model, args.seed)
        return
    for parameter in model.parameters():
        weight, seed = parameter, args.seed
        if isinstance(parameter, DTensor):
            weight, seed = parameter.to_local(), args.seed + 1 + dist.get_rank()
        generator = torch.Generator(weight.device).manual_seed(seed)
        weight.normal_(0, 0.02, generator=generator) if parameter.dim() > 1 else weight.fill_(1)


def runs(args: argparse.Namespace, model: nn.Module, device: torch.device) -> list[dict]:
    windows, length = map(int, args.tokens.split("x"))
    generator = torch.Generator().manual_seed(args.seed)
    tokens = torch.randint(model.config.vocab_size, (windows, length), generator=generator).to(device)
    config = PruneConfig(
        method=args.method,
        allocation=naive.ALLOCATIONS[args.method],
        no_check=True,
        compile="off",
        micro_batch=args.micro_batch,
        engine=args.engine,
        offload=args.offload,
    )
    found = []
    for index in range(args.repeats):
        refill(args, model)
        dist.barrier()
        save_in = args.results if args.save and index == args.repeats - 1 else None
        found.append(our_run(model, tokens, config, save_in))
    return found


def facts(args: argparse.Namespace, model: nn.Module) -> dict:
    """What was run, and on what machine."""
    ranks, blocks = dist.get_world_size(), find_blocks(model)[1]
    inside = sum(parameter.nbytes for parameter in blocks.parameters())
    outside = sum(parameter.nbytes for parameter in set(parameters_of_the_rest(model)))
    share = 0 if args.offload else inside / ranks
    return {
        "kind": "ranks",
        **machine(this_device()),
        "transformers": transformers.__version__,
        "shape": args.shape + (f", {args.blocks} blocks" if args.blocks else ""),
        "method": args.method,
        "tokens": args.tokens,
        "dtype": args.dtype,
        "engine": args.engine + (", offload" if args.offload else ""),
        "ranks": ranks,
        "weight_bytes": inside + outside,
        "weight_bound_bytes": outside + (inside if args.engine == "resident" else share + 3 * inside / len(blocks)),
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
