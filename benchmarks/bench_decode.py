"""Decoding with a pruned model, packed against dense: tokens/s, latency, J/token and memory, as one JSON file.

    python benchmarks/bench_decode.py DIR [--device cuda] [--dtype bfloat16]
    python benchmarks/bench_decode.py --shape llama-2-7b [--sparsities 0.5 0.6 0.7] [--blocks N]

DIR is a folder of `fwanda prune` or `fwanda pack`. A shape has random weights and random masks whose rows, columns and
matrices keep different shares, as those of F-Wanda do. First compares the logits of both forms; without agreement
nothing of the packed form is timed. On a GPU it decodes eagerly and by CUDA graphs. Prints the table of `fwanda bench`
and the path of the file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lib.machine import machine, this_device
from lib.results import UNSHARED, slug, write
from lib.shapes import SHAPES, build
from torch import nn

from fwanda_pruner import load_model, pack_
from fwanda_pruner.model.pack import packed_meanwhile
from fwanda_pruner.model.targets import Target, find_targets
from fwanda_pruner.run.bench import Row, as_dicts, bench, measure, table

ERROR = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}  # largest, as a share of the norm
SPREAD = 0.5  # standard deviation of the logarithms of what rows, columns and matrices keep, as under F-Wanda
_SAMPLE = 50_000  # scores of each matrix that set the threshold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("folder", metavar="DIR", nargs="?", help="folder of a pruned model")
    option("--shape", choices=SHAPES, help="random weights of this shape instead of a folder")
    option("--blocks", type=int, metavar="N", help="decoder blocks of the shape (default: all)")
    option("--sparsities", type=float, nargs="+", default=(0.5, 0.6, 0.7), metavar="S", help="of the random masks")
    option("--device", default="auto", help="as for fwanda bench")
    option("--dtype", choices=("float32", "bfloat16", "float16"))
    option("--batches", type=int, nargs="+", default=(1, 4, 16), metavar="N", help="sequences at once")
    option("--tokens", type=int, default=64, metavar="N", help="tokens to decode")
    option("--prompts", type=int, nargs="+", default=(512, 2048), metavar="N", help="tokens of prompts")
    option("--results", type=Path, default=UNSHARED, metavar="DIR", help="folder of the JSON file (%(default)s)")
    args = parser.parse_args()
    if (args.folder is None) == (args.shape is None):
        parser.error("give either DIR or --shape")
    works = {"batches": tuple(args.batches), "tokens": args.tokens, "prompts": tuple(args.prompts)}
    if args.shape is None:
        name, (device, dtype) = Path(args.folder).name, check_folder(args.folder, args.device, args.dtype)
        rows = bench(args.folder, device=args.device, dtype=args.dtype, **works)
    else:
        name, device, dtype = args.shape, this_device() if args.device == "auto" else args.device, args.dtype
        dtype = dtype or "bfloat16"
        rows = bench_shape(build(name, getattr(torch, dtype), device, 0, args.blocks), args.sparsities, works)
    result = machine(torch.device(device).type) | {"model": name, "dtype": dtype, "rows": as_dicts(rows)}
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"decode-{slug(result['model'], dtype, result['card'])}-{result['date']}.json"
    write(path, result)
    print(table(rows), path, sep="\n")


def bench_shape(model: nn.Module, sparsities: list[float], works: dict) -> list[Row]:
    """Rows of the dense model, and of the packed one at each sparsity, in ascending order."""
    rows = measure(model, "dense", **works)
    for sparsity in sorted(sparsities):
        prune_at_random(model, sparsity)
        dense = _logits(model)
        with packed_meanwhile(model):
            check(f"{sparsity:.0%}", _logits(model), dense)
            rows += measure(model, f"packed {sparsity:.0%}", **works)
    return rows


@torch.no_grad()
def prune_at_random(model: nn.Module, sparsity: float) -> None:
    """Set a share of the weights of all matrices to zero. What a larger share leaves, a smaller one leaves too.

    The scores are magnitudes of a normal variable times factors of the matrix, its rows and its columns. One threshold
    for all, from a sample of each matrix, divides them.
    """
    targets = find_targets(model)[0]
    sample = torch.cat([_sampled(_scores(index, target)) for index, target in enumerate(targets)])
    threshold = sample.kthvalue(max(1, round(sparsity * len(sample)))).values
    for index, target in enumerate(targets):
        target.weight.masked_fill_(_scores(index, target) <= threshold, 0)


def _sampled(scores: torch.Tensor) -> torch.Tensor:
    return scores.flatten()[:: max(1, scores.numel() // _SAMPLE)]


def _scores(seed: int, target: Target) -> torch.Tensor:
    device, (rows, cols) = target.weight.device, target.shape
    generator = torch.Generator(device).manual_seed(seed)
    matrix, row, column, weight = (
        torch.randn(shape, generator=generator, device=device) for shape in ((1, 1), (rows, 1), (1, cols), (rows, cols))
    )
    return weight.abs_() * (SPREAD * (matrix / 2 + row + column)).exp()


def check_folder(folder: str, device: str, dtype: str | None) -> tuple[str, str]:
    """Compare the logits of both forms; returns the device and the dtype of the model.

    Raises:
        SystemExit: they differ by more than rounding.
    """
    model = load_model(folder, device=device, dtype=dtype).model
    dense = _logits(model)
    check(folder, _logits(pack_(model)), dense)
    return model.device.type, str(model.dtype).removeprefix("torch.")


@torch.no_grad()
def _logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=torch.arange(32, device=model.device).view(2, 16)).logits


def check(what: str, packed: torch.Tensor, dense: torch.Tensor) -> None:
    """Refuse logits that differ by more than rounding.

    Raises:
        SystemExit: naming `what`.
    """
    error = float((packed.float() - dense.float()).norm() / dense.float().norm())
    if not error <= ERROR[dense.dtype]:
        raise SystemExit(
            f"{what}: the logits of the packed model differ by {error:.2g} of their norm; it was not timed"
        )


if __name__ == "__main__":
    main()
