"""`fwanda demo`: prunes SmolLM2-135M to 50 % in four ways, on text that comes with Python, and compares them."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .config import PruneConfig
from .errors import UserError
from .evaluate.perplexity import perplexity
from .formats.files import check_output
from .measure.statistics import Statistics
from .model.load import load_model, quiet
from .progress import begin_stage, planned
from .report.record import FILE_NAME, Report
from .run.pipeline import collect, prune
from .run.save import save_pruned
from .run.stage import timed
from .run.texts import protocol
from .stage_names import StageName, pruning_seconds
from .text.sources import SAMPLE
from .text.windows import evaluation_tokens

OUTPUT, QUICK_OUTPUT = "smollm2-pruned", "smollm2-pruned-quick"
_RUNS = (("wanda", "uniform"), ("fwanda", "row"), ("fwanda", "global"), ("sparsegpt", "uniform"))
_QUICK_RUNS = (("wanda", "uniform"), ("fwanda", "global"))
_FISHER_METHOD = "fwanda"  # of _RUNS, the one that needs a backward pass
_SPARSITY = "0.5"
_PROMPT, _NEW_TOKENS = "The Python programming language is", 24


class _Size(NamedTuple):
    """How much text the demo reads: windows for calibration, windows for evaluation, and tokens in each."""

    nsamples: int
    windows: int
    seqlen: int


_SIZE, _QUICK_SIZE = _Size(16, 16, 256), _Size(2, 2, 128)


@dataclass(frozen=True)
class _Shared:
    """What all runs of the demo have in common.

    Attributes:
        model, tokenizer: of the demo.
        statistics, calibration: of one forward and backward pass, which serves all runs of F-Wanda, and its seconds.
        windows: [S, L] int64 evaluation text.
        dense: perplexity of the dense model on it.
        sentence: what the dense model writes after the prompt.
        weights: of the dense model.
    """

    model: object
    tokenizer: object
    statistics: Statistics
    calibration: dict[str, float]
    windows: Tensor
    dense: float
    sentence: str
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class _Row:
    """One method: its report, and what its pruned model scores and writes."""

    method: str
    allocation: str
    report: Report
    pruned: float
    sentence: str


def run(output: Path | None = None, *, quick: bool = False) -> None:
    """Prunes by several methods and allocations, prints a table, and saves the best model.

    Args:
        output: folder for the best model; that of an earlier demo of the same size is replaced. None: `smollm2-pruned`
            in the current folder, and `smollm2-pruned-quick` for a quick demo.
        quick: use less text, and only two of the four runs.

    Raises:
        UserError: smollm2 is not installed, or output cannot be written.
    """
    size, runs = (_QUICK_SIZE, _QUICK_RUNS) if quick else (_SIZE, _RUNS)
    output = output or Path(QUICK_OUTPUT if quick else OUTPUT)
    overwrite = _is_same_demo(output, size)
    check_output(output, overwrite=overwrite)
    prepares = [
        "load SmolLM2-135M (the first time takes longer: a converted copy is kept)",
        f"calibrate {_FISHER_METHOD} on {size.nsamples} x {size.seqlen} tokens: a forward and a backward pass",
        "measure the dense model",
    ]
    prunes = [f"prune by {method} {allocation}, and measure the result" for method, allocation in runs]
    with planned([*prepares, *prunes]):
        shared = _prepare(size, prepares)
        rows, best = [], None
        with tempfile.TemporaryDirectory(prefix=".demo-", dir=output.resolve().parent) as scratch:
            for title, (method, allocation) in zip(prunes, runs, strict=True):
                begin_stage(title)
                row = _pruned(shared, method, allocation)
                # counts the zeros in the files
                save_pruned(shared.model, shared.tokenizer, row.report, Path(scratch, f"{method}-{allocation}"))
                rows.append(row)
                if best is None or row.pruned < best[0].pruned:
                    best = row, _copy(shared.model)
    row, weights = best
    shared.model.load_state_dict(weights)
    save_pruned(shared.model, shared.tokenizer, row.report, output, overwrite=overwrite)
    _print_table(rows, shared)
    _print_result(row, shared, output)


def _is_same_demo(output: Path, size: _Size) -> bool:
    """Whether a folder holds an earlier demo of the same size, which may be replaced.

    Raises:
        UserError: it holds anything else.
    """
    if not output.is_dir() or not any(output.iterdir()):
        return False
    if (output / FILE_NAME).exists():
        config = Report.load(output).config
        if config.get("model") == "smollm2" and (config.get("nsamples"), config.get("seqlen")) == (
            size.nsamples,
            size.seqlen,
        ):
            return True
    raise UserError(f"{output} exists and is not of this demo; choose another --output")


def _prepare(size: _Size, titles: Sequence[str]) -> _Shared:
    """Load the model, calibrate it, and measure its dense perplexity: three stages with these titles."""
    load, calibrate, measure = titles
    begin_stage(load)
    model, tokenizer = load_model("smollm2", device="cpu")
    begin_stage(calibrate)
    with timed(seconds := {}, StageName.CALIBRATE):
        statistics = collect(model, tokenizer, config=PruneConfig(nsamples=size.nsamples, seqlen=size.seqlen))
    begin_stage(measure)
    held_out = evaluation_tokens(SAMPLE, tokenizer, seqlen=size.seqlen, bos=statistics.bos, windows=size.windows)
    dense = perplexity(model, held_out, label="dense perplexity")
    sentence = _sentence(model, tokenizer)
    return _Shared(model, tokenizer, statistics, seconds, held_out, dense, sentence, _copy(model))


def _pruned(shared: _Shared, method: str, allocation: str) -> _Row:
    """Prune the dense model by one method, and measure the result."""
    shared.model.load_state_dict(shared.weights)
    config = PruneConfig(
        method=method,
        allocation=allocation,
        sparsity=_SPARSITY,
        nsamples=shared.statistics.text["nsamples"],
        seqlen=shared.statistics.text["seqlen"],
        no_check=True,  # the table compares the methods
    )
    statistics = shared.statistics if method == _FISHER_METHOD else None
    report = prune(shared.model, shared.tokenizer, config=config, statistics=statistics)
    if statistics is not None:
        report.seconds = shared.calibration | report.seconds
    pruned = perplexity(shared.model, shared.windows, label=f"{method} {allocation} perplexity")
    report.config |= {"eval": [SAMPLE], "eval_windows": shared.windows.shape[0]}
    text = {"source": SAMPLE, "dense": shared.dense, "pruned": pruned}
    text |= protocol(shared.windows, shared.statistics.bos, shared.tokenizer)
    sentence = _sentence(shared.model, shared.tokenizer)
    return _Row(method, allocation, replace(report, perplexity=[text]), pruned, sentence)


def _sentence(model, tokenizer) -> str:
    """What a model writes after the prompt, taking the likeliest token each time."""
    inputs = tokenizer(_PROMPT, return_tensors="pt").to(model.device)
    with quiet(), torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=_NEW_TOKENS, do_sample=False)
    return " ".join(tokenizer.decode(tokens[0], skip_special_tokens=True).split())


def _copy(model) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def _print_table(rows: list[_Row], shared: _Shared) -> None:
    windows, length = shared.windows.shape
    print(f"\nSmolLM2-135M-Instruct on CPU, {float(_SPARSITY):.0%} of the weights in its blocks removed.")
    print(f"Perplexity is measured on {windows} windows of {length} tokens of the documentation of Python")
    print(f"{platform.python_version()}, which calibration did not read.\n")
    print(f"{'':41} {'sparsity in files':>17} {'perplexity':>11} {'seconds':>8}")
    print(f"{'dense model':41} {'':17} {shared.dense:11.2f}")
    for row in rows:
        name, seconds = f"{row.method} {row.allocation}", row.report.seconds
        calibration = seconds.get(StageName.CALIBRATE.value, 0.0)
        passes = "forward, backward" if row.method == _FISHER_METHOD else "forward"
        first = row.method not in (other.method for other in rows[: rows.index(row)])
        if calibration and first:
            print(f"{f'calibration for {row.method}: {passes}':41} {'':29} {calibration:8.1f}")
        spent = pruning_seconds(seconds) - calibration
        print(f"{name:41} {row.report.sparsity['matrices']:17.4f} {row.pruned:11.2f} {spent:8.1f}")
    print("One calibration serves all runs of a method. SparseGPT calibrates while it prunes.")


def _print_result(best: _Row, shared: _Shared, output: Path) -> None:
    print(f"\ndense model:  {shared.sentence}")
    print(f"{best.method} {best.allocation}: {best.sentence}")
    print(f"\nSaved the model with the lowest perplexity, {best.method} {best.allocation}, in {output}.")
    print("Next, on a GPU:")
    print("  fwanda prune MODEL --allocation auto --sparsity 0.5 --calibration c4 --calibration self --output DIR")
    print("c4 needs a network and `pip install datasets`; self is text that the model writes. On a CPU, auto takes")
    print("tens of minutes for a run like this one.")
