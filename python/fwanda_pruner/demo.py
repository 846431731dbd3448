"""`fwanda demo`: prune SmolLM2-135M by four methods at 50 %, on text that comes with Python, and compare them."""

from __future__ import annotations

import platform
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from .config import PruneConfig
from .errors import UserError
from .evaluate.perplexity import perplexity
from .formats.files import check_output
from .measure.statistics import Statistics
from .model.load import load_model
from .report.record import FILE_NAME, Report
from .run.pipeline import collect, prune
from .run.save import save_pruned
from .run.stage import StageName, timed
from .run.texts import protocol
from .text.sources import SAMPLE
from .text.windows import evaluation_tokens

_RUNS = (("wanda", "uniform"), ("fwanda", "row"), ("fwanda", "global"), ("sparsegpt", "uniform"))
_QUICK_RUNS = (("fwanda", "global"), ("wanda", "uniform"))
_SPARSITY = "0.5"


@dataclass(frozen=True)
class _Shared:
    """What all runs of the demo have in common.

    Attributes:
        model, tokenizer: of the demo.
        statistics, calibration: of one calibration, which serves all methods that need one, and its seconds.
        windows: [S, L] int64 evaluation text.
        dense: perplexity of the dense model on it.
        weights: of the dense model.
    """

    model: object
    tokenizer: object
    statistics: Statistics
    calibration: dict[str, float]
    windows: Tensor
    dense: float
    weights: dict[str, Tensor]


def run(output: Path, *, quick: bool = False) -> None:
    """Prune by several methods, print a table, and save the best model.

    Args:
        output: folder for the best model; that of an earlier demo is replaced.
        quick: use less text and two methods.

    Raises:
        UserError: smollm2 is not installed, or output cannot be written.
    """
    overwrite = (output / FILE_NAME).exists()
    if not overwrite and output.is_dir() and any(output.iterdir()):
        raise UserError(f"{output} exists and is not of a demo; choose another --output")
    check_output(output, overwrite=overwrite)
    shared = _prepare(*((2, 2, 128) if quick else (16, 16, 512)))
    rows, best = [], None
    with tempfile.TemporaryDirectory(prefix=".demo-", dir=output.resolve().parent) as scratch:
        for method, allocation in _QUICK_RUNS if quick else _RUNS:
            report, seconds = _pruned(shared, method, allocation)
            # counts the zeros in the files
            save_pruned(shared.model, shared.tokenizer, report, Path(scratch, f"{method}-{allocation}"))
            pruned = report.perplexity[0]["pruned"]
            if best is None or pruned < best[0]:
                best = pruned, _copy(shared.model), report
            rows.append((method, allocation, report.sparsity["matrices"], pruned, seconds))
    shared.model.load_state_dict(best[1])
    save_pruned(shared.model, shared.tokenizer, best[2], output, overwrite=overwrite)
    _print(rows, shared.dense, shared.windows.shape, output)


def _prepare(nsamples: int, windows: int, seqlen: int) -> _Shared:
    """Load the model, calibrate it, and measure its dense perplexity."""
    model, tokenizer = load_model("smollm2", device="cpu")
    print(f"calibrating on {nsamples} x {seqlen} tokens", flush=True)
    with timed(seconds := {}, StageName.CALIBRATE):
        statistics = collect(model, tokenizer, config=PruneConfig(nsamples=nsamples, seqlen=seqlen))
    held_out = evaluation_tokens(SAMPLE, tokenizer, seqlen=seqlen, bos=statistics.bos, windows=windows)
    dense = perplexity(model, held_out, label="dense perplexity")
    return _Shared(model, tokenizer, statistics, seconds, held_out, dense, _copy(model))


def _pruned(shared: _Shared, method: str, allocation: str) -> tuple[Report, float]:
    """Prune the dense model by one method. Returns its report, with perplexities, and its seconds with calibration."""
    print(f"pruning by {method} {allocation}", flush=True)
    shared.model.load_state_dict(shared.weights)
    config = PruneConfig(
        method=method,
        allocation=allocation,
        sparsity=_SPARSITY,
        nsamples=shared.statistics.text["nsamples"],
        seqlen=shared.statistics.text["seqlen"],
        no_check=True,  # the table compares the methods
    )
    statistics = None if method == "sparsegpt" else shared.statistics
    report = prune(shared.model, shared.tokenizer, config=config, statistics=statistics)
    if statistics is not None:
        report.seconds = shared.calibration | report.seconds
    seconds = sum(report.seconds.values())
    pruned = perplexity(shared.model, shared.windows, label=f"{method} {allocation} perplexity")
    report.config |= {"eval": [SAMPLE], "eval_windows": shared.windows.shape[0]}
    text = {"source": SAMPLE, "dense": shared.dense, "pruned": pruned}
    text |= protocol(shared.windows, shared.statistics.bos, shared.tokenizer)
    return replace(report, perplexity=[text]), seconds


def _copy(model) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def _print(rows: list[tuple], dense: float, shape, output: Path) -> None:
    print(f"\nSmolLM2-135M-Instruct on CPU, {float(_SPARSITY):.0%} of the weights in its blocks removed.")
    print(f"Perplexity is measured on {shape[0]} windows of {shape[1]} tokens of the documentation of Python")
    print(f"{platform.python_version()}, which calibration did not read. The dense model has {dense:.2f}.\n")
    print(f"{'method':24} {'sparsity in files':>17} {'perplexity':>11} {'seconds':>8}")
    for method, allocation, sparsity, pruned, seconds in rows:
        print(f"{method + ' ' + allocation:24} {sparsity:17.4f} {pruned:11.2f} {seconds:8.1f}")
    method, allocation, *_ = min(rows, key=lambda row: row[3])
    print(f"\nSaved the best model, {method} {allocation}, in {output}.")
    print("Next, on a GPU:")
    print("  fwanda prune MODEL --method fwanda --allocation auto --sparsity 0.5 --calibration TEXT --output DIR")
    print("On a CPU, auto takes tens of minutes even for a model this small; global, above, is the quick choice.")
