"""Decoding with a pruned model, packed against dense: tokens/s, latency, J/token and memory, as one JSON file.

    python benchmarks/bench_decode.py DIR [--device cuda] [--dtype bfloat16]

DIR is a folder of `fwanda prune` or `fwanda pack`. First compares the logits of both forms; without agreement nothing
is timed. On a GPU it decodes eagerly and by CUDA graphs. Prints the table of `fwanda bench` and the path of the file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lib.machine import machine
from lib.results import UNSHARED, slug, write

from fwanda_pruner import load_model, pack_
from fwanda_pruner.run.bench import as_dicts, bench, table

ERROR = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}  # largest, as a share of the norm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("folder", metavar="DIR", help="folder of a pruned model")
    option("--device", default="auto", help="as for fwanda bench")
    option("--dtype", choices=("float32", "bfloat16", "float16"))
    option("--batches", type=int, nargs="+", default=(1, 4, 16), metavar="N", help="sequences at once")
    option("--tokens", type=int, default=64, metavar="N", help="tokens to decode")
    option("--prompts", type=int, nargs="+", default=(512, 2048), metavar="N", help="tokens of prompts")
    option("--results", type=Path, default=UNSHARED, metavar="DIR", help="folder of the JSON file (%(default)s)")
    args = parser.parse_args()
    device, dtype = check(args.folder, args.device, args.dtype)
    rows = bench(
        args.folder, device=args.device, dtype=args.dtype, batches=tuple(args.batches), tokens=args.tokens,
        prompts=tuple(args.prompts),
    )  # fmt: skip
    result = machine(device) | {"model": Path(args.folder).name, "dtype": dtype, "rows": as_dicts(rows)}
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"decode-{slug(result['model'], dtype, result['card'])}-{result['date']}.json"
    write(path, result)
    print(table(rows), path, sep="\n")


@torch.no_grad()
def check(folder: str, device: str, dtype: str | None) -> tuple[str, str]:
    """Compare the logits of both forms; returns the device and the dtype of the model.

    Raises:
        SystemExit: they differ by more than rounding.
    """
    model = load_model(folder, device=device, dtype=dtype).model
    ids = torch.arange(32, device=model.device).view(2, 16)
    dense = model(input_ids=ids).logits.float()
    error = float((pack_(model)(input_ids=ids).logits.float() - dense).norm() / dense.norm())
    if not error <= ERROR[model.dtype]:
        raise SystemExit(
            f"{folder}: the logits of the packed model differ by {error:.2g} of their norm; nothing was timed"
        )
    return model.device.type, str(model.dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
