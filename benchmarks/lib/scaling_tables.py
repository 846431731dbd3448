"""Tables of the cost model: beside the measurements that it covers, and for models that were not run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from . import cost
from .cost import Cost, Engine, Text
from .markdown import table
from .rates import CARDS, COMPILE, DISK, PCIE, START, Card
from .results import RESULTS
from .run_tables import label_of, newest_runs
from .sizes import Shape, shape_of

LARGE = ("llama-3-70b", "llama-3-405b", "deepseek-v3")
GPUS = (1, 8, 64)
_SEARCHED = ("response", "auto")  # allocations whose search sets the peak of the memory; the model leaves it out
_MEASURES = ("wanda", "fwanda", "fsparsegpt")  # methods with a calibration stage
_WALKS = ("sparsegpt", "fsparsegpt")  # methods that go through the blocks one by one


@dataclass(frozen=True)
class Comparison:
    """A measured figure and its prediction.

    Attributes:
        card, run: what ran.
        stage: "calibrate" or "prune"; the last one for the memory, which is that of the whole run.
        figure: "warm, s", "cold, s" or "peak, GB".
    """

    card: str
    run: str
    stage: str
    figure: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def comparisons(folder: Path = RESULTS) -> list[Comparison]:
    """All figures of the prune-*.json in a folder that the model covers; of runs on cards that it knows."""
    found = []
    for result in newest_runs(folder):
        if result["card"] in CARDS and result["dtype"] == "bfloat16" and result["method"] in (*_MEASURES, *_WALKS):
            found += _compared(result)
    return found


def _compared(result: dict) -> list[Comparison]:
    card, stages = CARDS[result["card"]], predicted_stages(result)
    run = f"{result['shape']}, {label_of(result)}"
    warm, cold = result["ours"]["warm"], result["ours"]["cold"]
    found = []
    for stage, expected in stages.items():
        measured = [one["seconds"][stage] for one in warm]
        if measured:
            found.append(Comparison(card.name, run, stage, "warm, s", sum(measured) / len(measured), expected.seconds))
        first = expected.seconds + cold_seconds(cold["passes"], result["method"])
        found.append(Comparison(card.name, run, stage, "cold, s", cold["seconds"][stage], first))
    if result["allocation"] not in _SEARCHED:
        measured_peak = max(one["peak_memory_bytes"] for one in warm or [cold]) / 1e9
        peak = max(expected.peak for expected in stages.values()) / 1e9
        found.append(Comparison(card.name, run, stage, "peak, GB", measured_peak, peak))
    return found


def predicted_stages(result: dict) -> dict[str, Cost]:
    """Stage -> its cost, for a result of bench_prune.py."""
    card, shape, text = CARDS[result["card"]], shape_of_result(result), text_of_result(result)
    passes, settings = result["ours"]["cold"]["passes"] or {}, result["settings"]
    engine = Engine(settings.get("engine", "resident"), segment=int(settings.get("segment", 4)))
    measuring = replace(
        engine, compiled=passes.get("compiled", False), checkpointing=passes.get("checkpointing", False)
    )
    stages = {}
    if result["method"] in _MEASURES:
        stages["calibrate"] = cost.calibration(card, shape, measuring, text)
    if result["method"] in _WALKS:
        stages["prune"] = cost.sparsegpt(card, shape, engine, text)
    return stages


def shape_of_result(result: dict) -> Shape:
    """The shape of a name as "llama-2-7b" or "llama-2-7b, 2 blocks"."""
    name, _, blocks = result["shape"].partition(", ")
    return shape_of(name, int(blocks.split()[0]) if blocks else None)


def text_of_result(result: dict) -> Text:
    """The windows, and how many of them had a backward pass by the FLOPs that the result counts."""
    windows, length = map(int, result["tokens"].split("x"))
    if result["flops"] is None:
        return Text(windows, length, windows)
    shape, window = shape_of_result(result), Text(1, length, 1)
    forward = cost.calibration_flops(shape, replace(window, fisher=0))
    backward = cost.calibration_flops(shape, window) - forward
    return Text(windows, length, round((result["flops"] - windows * forward) / backward))


def cold_seconds(passes: dict | None, method: str) -> float:
    """What the first run of a process takes longer."""
    graphs = (1 if method == "wanda" else 2) if passes and passes["compiled"] else 0
    return START + graphs * COMPILE


def measured(folder: Path = RESULTS) -> str:
    """Markdown: one row for each stage of each run."""
    rows: dict[tuple[str, str, str], dict[str, Comparison]] = {}
    for one in comparisons(folder):
        rows.setdefault((one.card, one.run, one.stage), {})[one.figure] = one
    figures = ("warm, s", "cold, s", "peak, GB")
    head = ["card", "run", "stage", *figures]
    lines = [[*key, *(_cell(row.get(figure)) for figure in figures)] for key, row in rows.items()]
    return table(head, lines)


def _cell(one: Comparison | None) -> str:
    return "-" if one is None else f"{one.predicted:.1f} / {one.measured:.1f} = {one.ratio:.2f}"


def several(card: Card = CARDS["NVIDIA H200"], gpus: tuple[int, ...] = (1, 2, 4, 8)) -> str:
    """Markdown: models that a GPU holds, on several of them; F-Wanda compiled."""
    head = ["model", "GPUs", "F-Wanda, s", "efficiency", "SparseGPT, s", "efficiency"]
    rows = []
    for shape in map(shape_of, ("llama-2-7b", "llama-2-13b")):
        alone = _resident(card, shape, 1)
        for ranks in gpus:
            pairs = zip(alone, _resident(card, shape, ranks), strict=True)
            cells = [(f"{together:.1f}", f"{one / ranks / together:.2f}") for one, together in pairs]
            rows.append([shape.name, str(ranks), *(text for cell in cells for text in cell)])
    return table(head, rows)


def _resident(card: Card, shape: Shape, ranks: int) -> tuple[float, float]:
    """Seconds of F-Wanda's calibration and of SparseGPT, with the whole model on each GPU."""
    engine = Engine("resident", ranks)
    calibration = cost.calibration(card, shape, replace(engine, compiled=True), Text())
    return calibration.seconds, cost.sparsegpt(card, shape, engine, Text()).seconds


def sizes(_folder: Path = RESULTS) -> str:
    """Markdown: what the large models weigh."""
    head = ["", *LARGE]
    shapes = [shape_of(name) for name in LARGE]
    tokens = Text().windows * Text().length
    lines = {
        "weights, of which a token uses": lambda s: f"{s.weights / 1e9:.1f} / {s.active / 1e9:.1f} billion",
        "all weights / largest block, bf16": lambda s: (
            f"{2 * s.weights / 1e9:.0f} / {2 * s.largest_block / 1e9:.1f} GB"
        ),
        "hidden states of 128 x 2,048 tokens": lambda s: f"{2 * tokens * s.hidden / 1e9:.1f} GB",
        "Hessians of a block": lambda s: f"{max(block.hessians for block in s.blocks) / 1e9:.1f} GB",
        "FLOPs of F-Wanda, backward pass in all 128 windows": lambda s: f"{cost.calibration_flops(s, Text()):.2g}",
        "FLOPs of F-Wanda, backward pass in 32 of them": lambda s: f"{cost.calibration_flops(s, Text(fisher=32)):.2g}",
    }
    return table(head, [[name, *map(line, shapes)] for name, line in lines.items()])


def large(card: Card = CARDS["NVIDIA H200"], gpus: tuple[int, ...] = GPUS) -> str:
    """Markdown: the large models on some GPUs of a kind."""
    head = [
        "model", "GPUs", "engine", "F-Wanda with the needed options, s", "peak, GB", "faster with", "F-Wanda, s",
        "most time in", "peak, GB", "32 Fisher windows, s", "SparseGPT, s", "peak, GB",
    ]  # fmt: skip
    return table(
        head, [_row(card, shape_of(name), ranks, **source) for name in LARGE for ranks, source in _cases(gpus)]
    )


def _cases(gpus: tuple[int, ...]) -> list[tuple[int, dict]]:
    """Numbers of GPUs, and where the weights are. One GPU is there twice: weights in RAM, and on an NVMe drive."""
    return [(n, {"source": source}) for n in gpus for source in ((PCIE, DISK) if n == 1 else (PCIE,))]


def _row(card: Card, shape: Shape, ranks: int, source: float) -> list[str]:
    text = Text()
    default = cost.engine_for(card, shape, ranks, text, source=source)
    best = cost.best_engine(card, shape, default, text)
    first, tuned = (cost.calibration(card, shape, engine, text) for engine in (default, best))
    fewer = cost.calibration(card, shape, best, replace(text, fisher=32))
    walker = cost.engine_for(card, shape, ranks, text, walks=True, source=source)
    walk = cost.sparsegpt(card, shape, walker, text)
    name = default.name + " --offload" * default.offload + " --checkpointing on" * default.checkpointing
    name += ", from disk" * (source == DISK)
    return [
        shape.name,
        str(ranks),
        name,
        _seconds(card, first),
        f"{first.peak / 1e9:.0f}",
        _settings(default, best),
        _seconds(card, tuned),
        tuned.bound,
        f"{tuned.peak / 1e9:.0f}",
        _seconds(card, fewer),
        _seconds(card, walk) + " (--offload)" * (walker.offload and not default.offload),
        f"{walk.peak / 1e9:.0f}",
    ]


def _seconds(card: Card, one: Cost) -> str:
    return f"{one.seconds:,.0f}" if cost.fits(card, one.peak) else "does not fit"


def _settings(default: Engine, best: Engine) -> str:
    """The options of `best` that `default` does not have."""
    options = {
        f"--micro-batch {best.micro_batch}": best.micro_batch != default.micro_batch,
        f"--segment {best.segment}": best.segment != default.segment,
        "--checkpointing on": best.checkpointing and not default.checkpointing,
    }
    return " ".join(option for option, wanted in options.items() if wanted) or "-"
