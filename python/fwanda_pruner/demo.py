"""`fwanda demo`: the packaged SmolLM2-135M pruned at 50 % by four methods, on text that comes with Python."""

from __future__ import annotations

import platform
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from .config import PruneConfig
from .errors import UserError
from .evaluate import perplexity as evaluate
from .formats.files import check_output
from .model.load import load_model
from .report.record import FILE_NAME
from .run.pipeline import collect, prune
from .run.save import save_pruned
from .run.texts import protocol
from .text.sources import SAMPLE
from .text.windows import evaluation_tokens

_RUNS = (("wanda", "uniform"), ("fwanda", "row"), ("fwanda", "global"), ("sparsegpt", "uniform"))
_SPARSITY = "0.5"


def run(output: Path, *, quick: bool = False) -> None:
    """Prune, compare and save the best model.

    Args:
        output: folder for the best model; replaced if an earlier demo wrote it.
        quick: less text and two methods.

    Raises:
        UserError: smollm2 is not installed, or output cannot be written.
    """
    nsamples, windows, seqlen = (2, 2, 128) if quick else (16, 16, 512)
    overwrite = (output / FILE_NAME).exists()
    if not overwrite and output.is_dir() and any(output.iterdir()):
        raise UserError(f"{output} exists and is not of a demo; choose another --output")
    check_output(output, overwrite=overwrite)
    config = PruneConfig(sparsity=_SPARSITY, nsamples=nsamples, seqlen=seqlen, no_check=True)  # the table shows it
    model, tokenizer = load_model("smollm2", device="cpu")
    print(f"calibrating on {nsamples} x {seqlen} tokens", flush=True)
    start = time.perf_counter()
    statistics = collect(model, tokenizer, config=config)
    calibration_seconds = time.perf_counter() - start
    held_out = evaluation_tokens(SAMPLE, tokenizer, seqlen=seqlen, bos=statistics.bos, windows=windows)
    dense = evaluate.perplexity(model, held_out, label="dense perplexity")
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    rows, best = [], None
    with tempfile.TemporaryDirectory(prefix=".demo-", dir=output.resolve().parent) as scratch:
        for method, allocation in _RUNS[2:3] + _RUNS[:1] if quick else _RUNS:
            print(f"pruning by {method} {allocation}", flush=True)
            model.load_state_dict(weights)
            settings = replace(config, method=method, allocation=allocation)
            start = time.perf_counter()
            report = prune(model, tokenizer, config=settings, statistics=None if method == "sparsegpt" else statistics)
            seconds = time.perf_counter() - start + (0 if method == "sparsegpt" else calibration_seconds)
            pruned = evaluate.perplexity(model, held_out, label=f"{method} {allocation} perplexity")
            report.config |= {"eval": SAMPLE, "eval_windows": windows}
            if method != "sparsegpt":
                report.seconds = {"calibrate": round(calibration_seconds, 3), **report.seconds}
            report.perplexity = {"dense": dense, "pruned": pruned, **protocol(held_out, statistics.bos, tokenizer)}
            save_pruned(model, tokenizer, report, Path(scratch, f"{method}-{allocation}"))  # audits the zeros
            if best is None or pruned < best[0]:
                best = pruned, {name: weight.clone() for name, weight in model.state_dict().items()}, report
            rows.append((method, allocation, report.sparsity["matrices"], pruned, seconds))
    model.load_state_dict(best[1])
    save_pruned(model, tokenizer, best[2], output, overwrite=overwrite)
    _print(rows, dense, held_out.shape, output)


def _print(rows: list[tuple], dense: float, shape, output: Path) -> None:
    print(f"\nSmolLM2-135M-Instruct on CPU, {float(_SPARSITY):.0%} of the weights in its blocks removed.")
    print(f"Perplexity: {shape[0]} windows of {shape[1]} tokens of the documentation of Python")
    print(f"{platform.python_version()}, held out from calibration; dense {dense:.2f}.\n")
    print(f"{'method':24} {'sparsity in files':>17} {'perplexity':>11} {'seconds':>8}")
    for method, allocation, sparsity, pruned, seconds in rows:
        print(f"{method + ' ' + allocation:24} {sparsity:17.4f} {pruned:11.2f} {seconds:8.1f}")
    best = min(rows, key=lambda row: row[3])
    print(f"\nSaved the best, {best[0]} {best[1]}, in {output}.")
    print("Next: fwanda prune MODEL --method fwanda --allocation auto --sparsity 0.5 --calibration TEXT --output DIR")
    print(
        "on a GPU; on a CPU auto takes tens of minutes even for such a model, and global, above, is the quick choice."
    )
