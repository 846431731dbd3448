"""A cost model of calibration and pruning: seconds and peak memory, from the shape of a model and the rates of a card.

It counts FLOPs and bytes, and divides them by measured rates. A pass takes as long as the slowest of three things that
run beside each other: the GPU, the host that launches its kernels, and the copies of weights. Gathers of shards come on
top. T is tokens, H the hidden size, I the gated activations of a token in the MLP, L the number of decoder blocks. All
memory and links are in bytes and bytes/s, all rates in FLOP/s. Weights and activations have two bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from fwanda_pruner.engine.ranks import GROUPS

from .rates import HOST_LINEAR, NETWORK, NODE, NVLINK, PCIE, Card
from .sizes import Block, Linears, Shape

# Elementwise kernels: values that they read and write, in multiples of H and I, counted in the code of a Llama block:
# norms, rotary embedding, gate, residuals, sums of gradients. Uncompiled norms compute in fp32, which counts double.
_ELEMENTWISE = {  # (compiled, backward) -> multiples of H, of I
    (True, False): (13, 3), (True, True): (19, 5),
    (False, False): (62, 5), (False, True): (115, 9),
}  # fmt: skip
_LOGIT_BYTES = 20  # read and written for each logit: to fp32, softmax, less the label, back to bf16
_LOGITS = (1 << 24) * 12  # bytes of the slice of logits that exists at once, with its softmax
_OBS_TOKENS = 8192  # tokens in a call of a block, for Hessians
_FACTOR_COPIES = 5  # of the largest Hessian, while its factor is computed
_BUSY = {True: 1 << 23, False: 1 << 25}  # activations [T, H] in a pass with / without backward, as ModelWindows
_TOKENS_OF_RAM, _TOKENS_OF_FILE = 8192, 65536  # in a pass that loads weights, at least, by where they come from
_SPARE = 0.8  # of the free memory that a pass of several windows may take, as in the window loop
_ARGUMENT_PASSES = 3  # forward passes over few windows, by which SparseGPT learns the arguments of the blocks


@dataclass(frozen=True)
class Text:
    """Calibration windows of `length` tokens, `fisher` of which also have a backward pass."""

    windows: int = 128
    length: int = 2048
    fisher: int = 128


@dataclass(frozen=True)
class Engine:
    """How a model runs.

    Attributes:
        name: resident, streamed or sharded.
        ranks: GPUs, which divide the windows; of a sharded engine also the weights.
        compiled: whether blocks are compiled; only the resident engine does that.
        checkpointing: whether blocks run again in the backward pass.
        segment: blocks on the GPU; streamed only.
        offload: shards lie in RAM; sharded only.
        source: bytes/s at which weights come from where they lie.
        micro_batch: windows in a pass; None: as the engine chooses.
    """

    name: str = "resident"
    ranks: int = 1
    compiled: bool = False
    checkpointing: bool = False
    segment: int = 4
    offload: bool = False
    source: float = PCIE
    micro_batch: int | None = None

    @property
    def link(self) -> float:
        """Bytes/s between the ranks."""
        return NVLINK if self.ranks <= NODE else NETWORK


@dataclass(frozen=True)
class Cost:
    """What a stage takes: warm seconds, bytes on the busiest GPU, and what takes longest (GPU, host or copies)."""

    seconds: float
    peak: float
    bound: str


# one pass


def attention_flops(shape: Shape, tokens: int, length: int) -> float:
    """Of a block, forward and causal: two products of 2 L^2 for each channel, of which the mask hides half."""
    return length * shape.channels * tokens


def calibration_flops(shape: Shape, text: Text) -> float:
    """FLOPs of the floor, as in bench_prune.py: 2 P T + attention forward, 2 P T + 2.5 attention + 2 head back."""
    flops = 0.0
    for windows, backward in ((text.windows, False), (text.fisher, True)):
        tokens = windows * text.length
        products = sum(2 * block.count * block.active * tokens for block in shape.blocks)
        attention = shape.depth * attention_flops(shape, tokens, text.length) * (2.5 if backward else 1)
        flops += products + attention + backward * 4 * shape.vocab * shape.hidden * tokens
    return flops


def forward_seconds(card: Card, shape: Shape, block: Block, tokens: int, length: int, compiled: bool) -> float:
    """Of a block on the GPU, with statistics."""
    products = sum(_product_seconds(card, linears, tokens) for linears in block.linears)
    attention = attention_flops(shape, tokens, length) / card.attention
    read = sum(linears.columns * linears.copies * linears.share for linears in block.linears)
    return products + attention + _moved_seconds(card, shape, block, tokens, (compiled, False), read)


def backward_seconds(card: Card, shape: Shape, block: Block, tokens: int, length: int, compiled: bool) -> float:
    """Of a block on the GPU, with statistics, without gradients of weights."""
    products = sum(_product_seconds(card, linears, tokens) for linears in block.linears)
    attention = 2.5 * attention_flops(shape, tokens, length) / card.attention
    read = sum(sum(linears.rows) * linears.copies * linears.share for linears in block.linears)
    return products + attention + _moved_seconds(card, shape, block, tokens, (compiled, True), read)


def head_seconds(card: Card, shape: Shape, tokens: int) -> float:
    """The head and its gradient."""
    logits = shape.vocab * tokens
    return 4 * logits * shape.hidden / card.matmul + logits * _LOGIT_BYTES / card.hbm


def _product_seconds(card: Card, linears: Linears, tokens: int) -> float:
    """Products with few tokens wait for the weights, as those of experts do."""
    return max(2 * linears.weights * linears.share * tokens / card.matmul, 2 * linears.weights / card.hbm)


def _moved_seconds(card: Card, shape: Shape, block: Block, tokens: int, kind: tuple[bool, bool], read: float) -> float:
    """Elementwise kernels, and the sums of squares, which read some values of each token once."""
    hidden, gated = _ELEMENTWISE[kind]
    return 2 * tokens * (hidden * shape.hidden + gated * block.gated + read) / card.hbm


def pass_seconds(
    card: Card, shape: Shape, engine: Engine, windows: int, length: int, backward: bool
) -> dict[str, float]:
    """Seconds of one pass: of the GPU, the host and the copies, which run beside each other, and of gathers."""
    tokens, again = windows * length, backward * _run_again(engine, shape)
    arguments = (tokens, length, engine.compiled)
    gpu, host = backward * head_seconds(card, shape, tokens), 0.0
    for block in shape.blocks:
        forward = (1 + again) * forward_seconds(card, shape, block, *arguments)
        gpu += block.count * (forward + backward * backward_seconds(card, shape, block, *arguments))
        host += block.count * HOST_LINEAR * block.layers * (1 + again + 2 * backward)
    return {
        "GPU": gpu,
        "host": 0.0 if engine.compiled else host,
        "copies": _copy_seconds(shape, engine, tokens, (1 + backward), again),
        "gathers": _gather_seconds(shape, engine, (1 + backward)),
    }


def _run_again(engine: Engine, shape: Shape) -> float:
    """Share of the blocks that a backward pass runs forward a second time."""
    if engine.name == "streamed":
        return 1 - engine.segment / shape.depth
    return float(engine.checkpointing)


def _copy_seconds(shape: Shape, engine: Engine, tokens: int, passes: int, again: float) -> float:
    """Of the weights of the blocks in a pass, where a backward pass is a second one; and of inputs that wait in RAM."""
    inside = 2 * shape.inside
    if engine.name == "streamed":
        kept = (passes - 1) * (1 - again)  # the last segment is still there when the backward pass begins
        inputs = again * shape.depth * 2 * tokens * shape.hidden
        return (passes - kept) * inside / engine.source + inputs / PCIE
    if engine.name == "sharded":
        return passes * engine.offload * inside / engine.ranks / engine.source
    return 0.0


def _gather_seconds(shape: Shape, engine: Engine, passes: int) -> float:
    """Of the shards of the other ranks in a pass."""
    return passes * 2 * shape.inside * (1 - 1 / engine.ranks) / engine.link if engine.name == "sharded" else 0.0


# stages


def calibration(card: Card, shape: Shape, engine: Engine, text: Text) -> Cost:
    """The statistics of F-Wanda, or of Wanda with text.fisher = 0."""
    engine = _as_made(engine, shape)
    spent: dict[str, float] = {}
    seconds = 0.0
    for windows, backward in ((text.fisher, True), (text.windows - text.fisher, False)):
        if not windows:
            continue
        own = busiest(windows, engine.ranks)
        size = micro_batch(card, shape, engine, text.length, backward, own)
        first = int(engine.compiled)  # it runs uncompiled, and its blocks again when it goes back
        plain = replace(engine, compiled=False, checkpointing=True)
        for how, many, count in ((engine, size, own - first), (plain, 1, first)):
            one = pass_seconds(card, shape, how, many, text.length, backward)
            seconds += count / many * _together(engine, one)
            for name, value in one.items():
                spent[name] = spent.get(name, 0.0) + count / many * value
    seconds += _merging_seconds(shape, engine)
    return Cost(seconds, calibration_peak(card, shape, engine, text), max(spent, key=spent.get))


def _as_made(engine: Engine, shape: Shape) -> Engine:
    """A streamed engine whose segment is the whole model is resident."""
    whole = engine.name == "streamed" and engine.segment >= shape.depth
    return replace(engine, name="resident") if whole else engine


def _together(engine: Engine, parts: dict[str, float]) -> float:
    """Seconds of a pass. Copies are hidden if a second block has room on the GPU; gathers of shards hardly are.

    That gathers take their full time fits the runs of 13B on 2 and of 70B on 4 H200; why was not measured.
    """
    if engine.name == "streamed" and engine.segment == 1:
        return max(parts["GPU"], parts["host"]) + parts["copies"]
    return max(parts["GPU"], parts["host"], parts["copies"]) + parts["gathers"]


def busiest(windows: int, ranks: int) -> int:
    """Windows of the rank that has most, as Ranks.groups() divides them."""
    groups = min(GROUPS, windows)
    return windows if ranks == 1 else min(windows, math.ceil(groups / ranks) * math.ceil(windows / groups))


def micro_batch(card: Card, shape: Shape, engine: Engine, length: int, backward: bool, most: int) -> int:
    """Windows in a pass: those that keep the GPU busy and hide the copies of weights, as far as they fit."""
    if engine.micro_batch is not None:
        return min(most, engine.micro_batch)
    wanted = round(_BUSY[backward] / (shape.hidden * length))
    if engine.name != "resident":
        least = _TOKENS_OF_FILE if engine.source < PCIE else _TOKENS_OF_RAM
        wanted = max(wanted, math.ceil(least / length))
    free = card.memory - weight_bytes(shape, engine)
    window = activation_bytes(shape, engine, length, backward)
    return max(1, min(most, wanted, int(_SPARE * free / window)))


def _merging_seconds(shape: Shape, engine: Engine) -> float:
    """The sums of each group go to all ranks; those of a rank are merged before."""
    nodes = min(GROUPS, engine.ranks) if engine.ranks > 1 else 0
    values = sum(
        b.count * sum((x.columns * len(x.rows) + sum(x.rows)) * x.copies for x in b.linears) for b in shape.blocks
    )
    return nodes * 4 * values / engine.link


def calibration_peak(card: Card, shape: Shape, engine: Engine, text: Text) -> float:
    """Bytes on a GPU."""
    peaks = []
    for windows, backward in ((text.fisher, True), (text.windows - text.fisher, False)):
        if windows:
            size = micro_batch(card, shape, engine, text.length, backward, busiest(windows, engine.ranks))
            peaks.append(weight_bytes(shape, engine) + activation_bytes(shape, engine, size * text.length, backward))
    return max(peaks)


def weight_bytes(shape: Shape, engine: Engine, *, walks: bool = False) -> float:
    """On a GPU. A walk through the blocks holds one: beside those that stream, but alone where weights are sharded."""
    outside, block = 2 * shape.outside, 2 * shape.largest_block
    if engine.name == "streamed":
        return outside + min(shape.depth, engine.segment + walks) * block
    if engine.name == "sharded":
        shard = 0 if engine.offload else 2 * shape.inside / engine.ranks
        return outside + shard + min(1 if walks else 3, shape.depth) * block
    return 2 * shape.weights


def activation_bytes(shape: Shape, engine: Engine, tokens: int, backward: bool) -> float:
    """What a pass keeps, and its largest temporary tensors."""
    gated = max(block.gated for block in shape.blocks)
    working = 2 * tokens * (2 * shape.hidden + 3 * gated)
    if not backward:
        return working
    norms, mlp = (2, 2) if engine.compiled else (4, 3)  # uncompiled norms keep their input in fp32
    kept = norms * shape.hidden + 2 * shape.channels + mlp * gated
    values = shape.depth * kept
    if engine.name == "streamed":  # inputs of the other blocks wait in RAM
        values = engine.segment * kept
    elif engine.checkpointing:  # one block runs again at a time
        values = kept + (shape.depth - 1) * shape.hidden
    return 2 * tokens * values + max(working, min(_LOGITS, 12 * tokens * shape.vocab))


def sparsegpt(card: Card, shape: Shape, engine: Engine, text: Text) -> Cost:
    """SparseGPT block by block: forward with Hessians, factors, pruning, forward again."""
    engine = _as_made(engine, shape)
    own = busiest(text.windows, engine.ranks)
    size = min(own, engine.micro_batch or max(1, _OBS_TOKENS // text.length))
    tokens = own * text.length
    spent = {"GPU": 0.0, "host": 0.0, "copies": 0.0}
    seconds = 0.0
    for block in shape.blocks:
        passes = 2 * own / size
        forward = passes * forward_seconds(card, shape, block, size * text.length, text.length, compiled=False)
        gram = sum(x.columns**2 * x.copies * x.share for x in block.linears) * tokens / card.matmul
        host = passes * HOST_LINEAR * block.layers
        pruning = _owner_seconds(card, block, engine.ranks)
        copies = _obs_copy_seconds(block, engine)
        spent["GPU"] += block.count * (forward + gram + pruning)
        spent["host"] += block.count * max(0.0, host - forward - gram)
        spent["copies"] += block.count * copies
        seconds += block.count * (max(forward + gram, host) + pruning + copies)
    seconds += _ARGUMENT_PASSES * _together(engine, pass_seconds(card, shape, engine, 1, text.length, False))
    return Cost(seconds, sparsegpt_peak(shape, engine, own, text.length), max(spent, key=spent.get))


def _owner_seconds(card: Card, block: Block, ranks: int) -> float:
    """Factors and pruning on the rank with most of it: each set of layers with one Hessian has one owner."""
    jobs = ((x.columns**2 * (x.columns + sum(x.rows)), x.copies) for x in block.linears)
    return max(_loads([work for work, copies in jobs for _ in range(copies)], ranks)) / card.fp32


def _loads(jobs: Sequence[float], ranks: int) -> list[float]:
    """Work of each rank: the largest job first, each to the least loaded rank, as Ranks.merge() does."""
    loads = [0.0] * ranks
    for job in sorted(jobs, reverse=True):
        loads[loads.index(min(loads))] += job
    return loads


def _obs_copy_seconds(block: Block, engine: Engine) -> float:
    """Of one block: weights that nothing hides, Hessians on their way to their owners, pruned weights to all ranks."""
    seconds, weights = 0.0, 2 * block.weights
    if engine.name == "streamed":
        seconds += weights / engine.source  # written back; the next block is loaded meanwhile
    if engine.name == "sharded":
        seconds += weights / engine.link
    if engine.ranks > 1:  # an owner gets its Hessians from all others, one after the other
        got = (min(GROUPS, engine.ranks) - 1) * max(block.largest_hessian, block.hessians / engine.ranks)
        seconds += (max(got, block.hessians) + weights) / engine.link
    return seconds


def sparsegpt_peak(shape: Shape, engine: Engine, windows: int, length: int) -> float:
    """Bytes on a GPU: weights, hidden states, and Hessians with their factors and what computing a factor takes."""
    block = max(shape.blocks, key=lambda block: block.hessians)
    states = 2 * windows * length * shape.hidden
    hessians = block.hessians * (1 + 1 / engine.ranks) + _FACTOR_COPIES * block.largest_hessian
    return weight_bytes(shape, engine, walks=True) + states + hessians


# choices


def fits(card: Card, peak: float) -> bool:
    return peak <= 0.95 * card.memory


def engine_for(card: Card, shape: Shape, ranks: int, text: Text, *, walks: bool = False, **settings) -> Engine:
    """Resident where a card holds the model, else streamed on one GPU, and sharded on several.

    `--checkpointing on` and `--offload` are given only where the memory does not suffice otherwise.

    Args:
        walks: whether the memory is that of SparseGPT.
    """
    if 2 * shape.weights <= 0.8 * card.memory:
        return Engine("resident", ranks, **settings)
    if ranks == 1:
        return Engine("streamed", 1, **settings)
    stage = sparsegpt if walks else calibration
    sharded = [
        Engine("sharded", ranks, checkpointing=again, offload=offload, **settings)
        for offload, again in product((False, True), repeat=2)
    ]
    return next((e for e in sharded if fits(card, stage(card, shape, e, text).peak)), sharded[-1])


def best_engine(card: Card, shape: Shape, first: Engine, text: Text) -> Engine:
    """An engine with the fastest --micro-batch, --segment and --checkpointing for F-Wanda that fit the memory.

    Of equally fast ones, `first` itself, or else that with the least memory.
    """
    segments = (1, 2, 4) if first.name == "streamed" else (first.segment,)
    again = (False, True) if first.name == "sharded" else (first.checkpointing,)
    found = [
        replace(first, micro_batch=size, segment=segment, checkpointing=c)
        for size, segment, c in product((1, 2, 4, 8, 16, 32), segments, again)
    ]
    costs = {engine: calibration(card, shape, engine, text) for engine in [first, *found]}
    fitting = [engine for engine in costs if fits(card, costs[engine].peak)] or [first]
    return min(fitting, key=lambda e: (round(costs[e].seconds), e != first, costs[e].peak))
