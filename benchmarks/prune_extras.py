"""What bench_prune.py measures beside the runs: equal masks, the cost of the statistics, and the energy of decoding."""

from __future__ import annotations

import dataclasses
import statistics
import time

import torch
from prune_naive import activations_only
from repeats import repeated
from torch import Tensor, nn

from fwanda_pruner import PruneConfig
from fwanda_pruner.engine.loop import Passes, PassSettings
from fwanda_pruner.model.targets import Target, find_targets

GENERATED = 128  # tokens decoded
_PROMPT = 16
_OVERHEAD_ROUNDS = 3
_WARM_UP = 4  # micro-batches, of which the last are compiled
_BITS = 8


def packed_masks(targets: list[Target]) -> list[Tensor]:
    """The zeros of each weight, eight in a byte, on the CPU: [ceil(R C / 8)] uint8 each."""
    return [_packed(target.weight).cpu() for target in targets]


def masks_agree(targets: list[Target], masks: list[Tensor]) -> float:
    """Share of the weights that are zero in both or in neither; masks from packed_masks()."""
    ones = torch.tensor([byte.bit_count() for byte in range(256)], device=targets[0].weight.device)
    differ = total = 0
    for target, mask in zip(targets, masks, strict=True):
        different = _packed(target.weight) ^ mask.to(target.weight.device)
        differ += int(ones[different.int()].sum())
        total += target.weight.numel()
    return 1 - differ / total


def _packed(weight: Tensor) -> Tensor:
    zeros = nn.functional.pad((weight == 0).flatten(), (0, -weight.numel() % _BITS)).view(-1, _BITS)
    places = (2 ** torch.arange(_BITS, device=weight.device)).to(torch.uint8)
    return (zeros * places).sum(1, dtype=torch.uint8)


def statistics_overhead(model: nn.Module, tokens: Tensor, config: PruneConfig) -> dict:
    """Percent that collecting statistics adds to the forward and backward passes over all windows: medians of turns."""
    modules = {target.name: target.module for target in find_targets(model)[0]}
    facts = _passes(model, tokens, modules, PassSettings.of(config))[1]
    settings = PassSettings(
        facts.micro_batch, "on" if facts.compiled else "off", "on" if facts.checkpointing else "off"
    )
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    _passes(model, tokens[: _WARM_UP * facts.micro_batch], {}, settings)
    for _ in range(_OVERHEAD_ROUNDS):
        for name, measured in (("with", modules), ("without", {})):
            seconds[name].append(_passes(model, tokens, measured, settings)[0])
    with_, without = (statistics.median(seconds[name]) for name in ("with", "without"))
    return {"percent": 100 * (with_ / without - 1), "seconds": seconds, "passes": dataclasses.asdict(facts)}


def _passes(model: nn.Module, tokens: Tensor, modules: dict, settings: PassSettings):
    passes = Passes(model, modules, tokens, backward=True, settings=settings)
    _wait(tokens)
    start = time.perf_counter()
    with activations_only(model):
        facts = passes.run()[1]
    _wait(tokens)
    return time.perf_counter() - start, facts


def decoding_energy(model: nn.Module, tokens: Tensor) -> dict | str:
    """Energy for each token of a greedy decoding of 128 tokens at batch 1, or why it was not measured.

    The prompt is the first 16 of tokens [S, L]; reading it is part of the work.
    """
    prompt = tokens[:1, :_PROMPT]
    found = repeated(lambda: decode(model, prompt, GENERATED), tokens.device, units=GENERATED)
    return found if isinstance(found, str) else dataclasses.asdict(found) | {"generated": GENERATED}


def decode(model: nn.Module, prompt: Tensor, count: int) -> Tensor:
    """[1, count] ids that follow prompt [1, L], each the likeliest; for a model without an end token."""
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=count)[:, prompt.shape[1] :]


def _wait(tokens: Tensor) -> None:
    if tokens.device.type == "cuda":
        torch.cuda.synchronize()
