"""What each rank of tests/test_sharded.py does: it runs sharded models, and writes down what it found in R.json."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import measuring
import rank_worker
import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import fwanda_pruner
from fwanda_pruner.allocate import response
from fwanda_pruner.engine.engine import make_engine
from fwanda_pruner.engine.model_windows import ModelWindows
from fwanda_pruner.evaluate.lm_eval_tasks import check_place
from fwanda_pruner.formats import dense
from fwanda_pruner.measure.statistics import measure_statistics
from fwanda_pruner.model.read_shares import can_read_shares
from fwanda_pruner.model.sharding import gathered_parts, shard_
from fwanda_pruner.model.targets import find_targets

TEXT = tiny.tokens(7, 24).clamp(min=9)  # neither 2 nor 3 ranks divide it, and the last one has the fewest passes
FEW = TEXT[:2]
CPU = torch.device("cpu")
BLOCKS = 3
LLAMA = partial(tiny.llama, blocks=BLOCKS)
ODD = partial(tiny.llama, blocks=BLOCKS, intermediate_size=47, vocab_size=67)  # rows that no number of ranks divides
RUNS: dict[str, tuple[Callable[[], nn.Module], dict]] = {  # name -> model, settings
    "magnitude": (LLAMA, {"method": "magnitude"}),
    "wanda-sequential": (ODD, {"method": "wanda", "order": "sequential"}),
    "fwanda-row": (LLAMA, {"method": "fwanda", "allocation": "row"}),
    "fwanda-global": (ODD, {"method": "fwanda", "allocation": "global"}),
    "fwanda-auto": (LLAMA, {"method": "fwanda", "allocation": "auto"}),
    "sparsegpt": (ODD, {"method": "sparsegpt"}),
    "sparsegpt-true-sequential": (LLAMA, {"method": "sparsegpt", "order": "true-sequential"}),
    "fsparsegpt-response": (LLAMA, {"method": "fsparsegpt", "allocation": "response"}),
    "fsparsegpt-2:4": (LLAMA, {"method": "fsparsegpt", "pattern": "2:4"}),
    "few windows": (LLAMA, {"method": "sparsegpt", "calibration": FEW}),
    "micro-batch": (LLAMA, {"method": "fwanda", "micro_batch": "3", "order": "sequential"}),
    "a pass less": (LLAMA, {"method": "sparsegpt", "micro_batch": "2", "calibration": TEXT[:6]}),
    "checkpointing": (LLAMA, {"method": "fwanda", "checkpointing": "on"}),
    "exclude": (partial(tiny.build, "gpt_oss"), {"method": "wanda", "exclude": ("*.2.down_proj", "*.q_proj")}),
    "gpt2": (partial(tiny.build, "gpt2"), {"method": "wanda", "order": "sequential"}),
    "llava": (partial(tiny.build, "llava"), {"method": "fwanda"}),
    "opt": (partial(tiny.build, "opt"), {"method": "sparsegpt"}),  # its blocks lie in model.decoder
    "mixtral": (partial(tiny.build, "mixtral"), {"method": "sparsegpt"}),
    "qwen3_moe": (partial(tiny.build, "qwen3_moe"), {"method": "fwanda", "allocation": "response"}),
}
ON_THREE = ("wanda-sequential", "fwanda-global", "sparsegpt", "fsparsegpt-2:4", "few windows", "micro-batch", "mixtral")


def pruned(model: nn.Module, settings: dict) -> fwanda_pruner.Report:
    """The record of a run; its texts are the same for all."""
    given = {"calibration": TEXT, "eval": TEXT[:5], "guard": "none", "fisher_samples": "4", "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fwanda_pruner.prune(model, tiny.tokenizer(), **{**given, **settings})


def sharded(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    shard_(model, CPU)
    return model


def found(model: nn.Module, report: fwanda_pruner.Report) -> dict:
    """The bits of a pruned model, on the first rank, and what its record says."""
    record = report.to_dict()
    facts = {name: record[name] for name in ("matrices", "perplexity", "domains", "refit", "row_histogram")}
    if report.engine == "sharded":
        parts = {}
        for part in gathered_parts(model, 0):
            parts |= part
        tensors = [parts[name] for name in model.state_dict()] if parts else []
    else:
        tensors = model.state_dict().values()
    return {"weights": rank_worker.hashed(tensors), "facts": facts, "engine": report.engine, "ranks": report.ranks}


def runs() -> dict:
    """The runs with a sharded model; of two ranks also with resident ones."""
    results: dict = {"sharded": {}, "resident": {}}
    two = dist.get_world_size() == 2
    for name in RUNS if two else ON_THREE:
        make, settings = RUNS[name]
        model = sharded(make)
        results["sharded"][name] = found(model, pruned(model, {**settings, "engine": "sharded"}))
        if two:
            model = make()
            results["resident"][name] = found(model, pruned(model, settings))
    return results


def statistics() -> dict:
    """Whether the bits of statistics are those of resident ranks, for each kind of Fisher information."""
    same = {}
    models = {"empirical": LLAMA, "true": LLAMA, "mean": LLAMA, "head in slices": measuring.MODELS["vocabulary_262k"]}
    for kind, make in models.items():
        hashes = set()
        for model in (make(), sharded(make)):
            engine = make_engine(model, find_targets(model)[0], progress=False)
            fisher = "empirical" if kind == "head in slices" else kind
            parts = measure_statistics(engine, TEXT[:5], fisher=fisher, seed=3).to_parts()[0]
            hashes.add(rank_worker.hashed(parts.values()))
        same[kind] = len(hashes) == 1
    return same


def other_calls() -> dict[str, bool]:
    """Whether other functions of the package give the same for both engines."""
    found = {}
    for engine, model in (("resident", ODD()), ("sharded", sharded(ODD))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            evaluated = fwanda_pruner.evaluate_model(model, eval=TEXT[:5], progress=False)
            collected = fwanda_pruner.collect(model, calibration=TEXT, progress=False)
        masks = list(fwanda_pruner.masks(model, pruned(model, {"method": "wanda", "engine": engine})))
        found[engine] = {
            "evaluate_model": evaluated,
            "collect": [collected.fingerprint(), collected.weights],
            "masks": [[name for name, _ in masks], rank_worker.hashed(mask for _, mask in masks)],
        }
    return {name: found["sharded"][name] == value for name, value in found["resident"].items()}


def whole_blocks() -> list[int]:
    """How many blocks had their whole weights at each call of a hook, forward and backward."""
    model, counts = sharded(partial(tiny.llama, blocks=5)), []
    blocks = model.model.layers

    def note(_module, _inputs, output) -> None:
        count()
        if output.requires_grad:
            output.register_hook(count)

    def count(*_) -> None:
        counts.append(sum(not isinstance(block.mlp.up_proj.weight, DTensor) for block in blocks))

    for block in blocks:
        block.mlp.up_proj.register_forward_hook(note)
    pruned(model, {"method": "fwanda", "engine": "sharded", "fisher_samples": "all"})
    count()
    return counts


def save_folders(folder: Path) -> None:
    """Writes models, and what each engine makes of them: in one file, and by the sharded one also in several."""
    dist.barrier()
    if dist.get_rank() == 0:
        LLAMA().save_pretrained(folder / "llama")
        tiny.build("mixtral").save_pretrained(folder / "mixtral")
    dist.barrier()
    limit = dense.FILE_BYTES
    for name in ("llama", "mixtral"):
        for engine in ("sharded", "resident"):
            model = fwanda_pruner.load_model(folder / name, device="cpu", engine=engine).model
            report = pruned(model, {"method": "fwanda", "engine": engine})
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                fwanda_pruner.save_pruned(model, None, report, folder / f"{name} {engine}")
                if engine == "sharded":
                    dense.FILE_BYTES = 40_000
                    fwanda_pruner.save_pruned(model, None, report, folder / f"{name} in files")
                    dense.FILE_BYTES = limit
        dist.barrier()


def little_memory(model: nn.Module) -> None:
    """A run whose first pass does not fit the memory."""
    run = ModelWindows.run

    def scarce(*_) -> None:
        raise torch.OutOfMemoryError

    ModelWindows.run = scarce
    try:
        pruned(model, {"engine": "sharded"})
    finally:
        ModelWindows.run = run


def refusals() -> dict[str, str]:
    """What is refused, by name."""
    model = sharded(LLAMA)
    calls = {
        "self": lambda: pruned(model, {"calibration": "self", "nsamples": 4, "seqlen": 24}),
        "resident": lambda: pruned(model, {"engine": "resident"}),
        "streamed": lambda: pruned(model, {"engine": "streamed"}),
        "packed": lambda: fwanda_pruner.save_pruned(model, None, pruned(model, {"save": "packed"}), "never"),
        "plain": lambda: pruned(LLAMA(), {"engine": "sharded"}),
        "offload": lambda: shard_(LLAMA(), CPU, offload=True),
        "memory": partial(little_memory, model),
        "tasks": lambda: check_place(model, ["boolq"]),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except fwanda_pruner.UserError as error:
            messages[name] = str(error)
    return messages


def main(folder: Path) -> int:
    """Writes what this rank found, and returns 0."""
    response.round_count = lambda _config: 2
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    results = runs() | {
        "statistics": statistics(),
        "other calls": other_calls(),
        "whole blocks": whole_blocks(),
        "refusals": refusals(),
        "can read shares": can_read_shares(CPU),
    }
    save_folders(folder / "saved")
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    return 0
