"""What each rank of tests/test_ranks.py does: it joins the others by gloo, and writes down what it found.

The environment has the variables of torchrun. What rank R found lies in R.json.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from datetime import timedelta
from pathlib import Path

import tiny
import torch
import torch.distributed as dist

import fwanda_pruner
from fwanda_pruner.allocate import response
from fwanda_pruner.engine.engine import make_engine
from fwanda_pruner.engine.model_windows import ModelWindows
from fwanda_pruner.evaluate.perplexity import perplexity
from fwanda_pruner.measure.statistics import measure_statistics
from fwanda_pruner.model.targets import find_targets

TEXT = tiny.tokens(21, 24)  # 21 windows: neither the groups nor the ranks divide them
FEW = tiny.tokens(2, 24)  # fewer windows than ranks
EVAL = tiny.tokens(5, 24, seed=1)
SETTINGS = {"nsamples": 21, "seqlen": 24, "progress": False}


def hashed(tensors) -> str:
    """sha256 of the bits of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def weights_of(model) -> str:
    return hashed(model.state_dict().values())


def runs() -> dict[str, dict]:
    """Settings of prune(), by name: every method with each of its allocations and orders, and more."""
    found = {"-".join(run): dict(zip(("method", "allocation", "order"), run, strict=True)) for run in tiny.EVERY_RUN}
    found["fwanda-true"] = {"method": "fwanda", "fisher": "true"}
    found["fwanda-mean"] = {"method": "fwanda", "fisher": "mean", "fisher_samples": "all"}
    found["fwanda-2:4"] = {"method": "fwanda", "pattern": "2:4", "allocation": "response"}
    found["fsparsegpt-2:4"] = {"method": "fsparsegpt", "pattern": "2:4"}
    found["sparsegpt-true-sequential"] = {"method": "sparsegpt", "order": "true-sequential"}
    found["micro-batch"] = {"method": "fsparsegpt", "micro_batch": "4"}
    found["self"] = {"method": "fwanda", "calibration": "self", "nsamples": 8}
    found["streamed"] = {"method": "fsparsegpt", "engine": "streamed", "segment": 1}
    found["streamed-auto"] = {"method": "fwanda", "allocation": "auto", "engine": "streamed", "segment": 1}
    found["few"] = {"method": "sparsegpt", "calibration": FEW}
    found["experts"] = {"method": "sparsegpt", "family": "qwen2_moe"}
    found["experts-fwanda"] = {"method": "fwanda", "allocation": "response", "family": "qwen3_moe"}
    return found


def pruned(settings: dict) -> dict:
    """The bits and the record of a run."""
    settings = {**SETTINGS, "calibration": TEXT, "eval": EVAL, "guard": "none", **settings}
    if settings["calibration"] is not TEXT:
        settings = {key: value for key, value in settings.items() if key != "nsamples" or value != 21}
    family = settings.pop("family", None)
    model = tiny.build(family) if family else tiny.llama()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        report = fwanda_pruner.prune(model, tiny.tokenizer(), **settings)
    record = report.to_dict()
    names = ("matrices", "perplexity", "domains", "warnings", "refit", "row_histogram", "tokens_sha256", "passes")
    facts = {name: record[name] for name in names}
    facts["chosen"] = report.config["chosen"]
    return {"weights": weights_of(model), "facts": facts, "shown": len(shown), "ranks": report.ranks}


def sums() -> dict:
    """Statistics and a perplexity as numbers, to be compared with those of a process without groups."""
    found = {}
    for kind in ("empirical", "true", "mean"):
        model = tiny.llama()
        engine = make_engine(model, find_targets(model)[0], progress=False)
        statistics = measure_statistics(engine, TEXT, fisher=kind, seed=3)
        found[kind] = {name: tensor.tolist() for name, tensor in statistics.to_parts()[0].items()}
    found["perplexity"] = perplexity(tiny.llama(), EVAL, progress=False)
    return found


def little_memory(rank: int) -> dict:
    """A run in which the last rank once runs out of memory."""
    run, failures = ModelWindows.run, [torch.OutOfMemoryError()] * (rank > 0 and rank == dist.get_world_size() - 1)

    def scarce(self, start, size):
        if size > 2 and failures:
            raise failures.pop()
        run(self, start, size)

    ModelWindows.run = scarce
    try:
        return pruned({"method": "fwanda", "micro_batch": "4"})
    finally:
        ModelWindows.run = run


def refusals(rank: int) -> dict[str, str]:
    """What each call says where the last rank has another model; nothing without another rank."""
    last = rank > 0 and rank == dist.get_world_size() - 1
    calls = {
        "prune": lambda model: fwanda_pruner.prune(model, calibration=TEXT, progress=False),
        "collect": lambda model: fwanda_pruner.collect(model, calibration=TEXT, progress=False),
        "evaluate_model": lambda model: fwanda_pruner.evaluate_model(model, eval=EVAL, progress=False),
    }
    found = {}
    for name, call in calls.items():
        try:
            call(tiny.llama(seed=int(last)))
        except fwanda_pruner.UserError as error:
            found[name] = str(error)
    return found


def main(folder: Path) -> int:
    """Writes what this rank found, and returns 0."""
    response.round_count = lambda _config: 2
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    found = {"runs": {name: pruned(settings) for name, settings in runs().items()}}
    found |= {"sums": sums(), "little memory": little_memory(rank), "refusals": refusals(rank)}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0
