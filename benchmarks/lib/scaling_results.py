"""Tables of runs on several GPUs, from results of bench_scaling.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from . import markdown, scaling_cases
from .cost import Cost, Text
from .rates import CARDS
from .results import RESULTS, read_all
from .run_tables import heading
from .scaling_cases import Case

HEAD = (
    "case", "GPUs", "alone, s", "together, s", "efficiency", "predicted, s", "peak a GPU, GB", "predicted, GB",
    "checks",
)  # fmt: skip


def full(folder: Path = RESULTS) -> str:
    """Markdown: a table for each result, the newest of each card and number of GPUs."""
    newest = {(result["card"], result["gpus"]): result for result in read_all("scaling", folder).values()}
    if not newest:
        return "Not measured yet.\n"
    return "\n".join(f"{heading([result])}\n\n{table(result)}" for result in newest.values())


def table(result: dict) -> str:
    """Markdown: one row for each case, with what the cost model predicts on a card that it knows."""
    return markdown.table(HEAD, [_cells(case, predicted(result, case)) for case in result["cases"]])


def predicted(result: dict, case: dict) -> Cost | None:
    """What the cost model says of a case on all GPUs."""
    windows, length = map(int, result["tokens"].split("x"))
    what, text, card = Case(case["case"], case["shape"]), Text(windows, length, windows), CARDS.get(result["card"])
    engine = scaling_cases.engine_of(what, card, case["gpus"], text)
    return scaling_cases.predicted(what, card, replace(engine, micro_batch=case.get("micro_batch")), text)


def _cells(case: dict, expected: Cost | None) -> list[str]:
    name = [f"{case['case']} {case['shape']}", str(case["gpus"])]
    if "left_out" in case:
        return [*name, *"------", f"left out: {case['left_out']}"]
    together, alone = case["together"], case.get("alone", {})
    return [
        *name,
        _number(alone.get("seconds"), 2),
        _number(together["seconds"], 2),
        _number(case.get("efficiency"), 2),
        _number(expected and expected.seconds, 2),
        _number(together["peak_memory_bytes"], 1, 1e9),
        _number(expected and expected.peak, 1, 1e9),
        _checks(case["checks"]),
    ]


def _number(value: float | None, digits: int, unit: float = 1) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def _checks(checks: dict) -> str:
    """What all ranks agree on, and how far they are from the run alone."""
    equal = {
        "statistics equal on all ranks": checks["statistics_equal_on_all_ranks"],
        "masks equal on all ranks": checks["masks_equal_on_all_ranks"],
        "masks of equal statistics equal": checks.get("masks_of_equal_statistics_equal"),
    }
    words = [name if held else f"**NOT** {name}" for name, held in equal.items() if held is not None]
    if "largest_relative_difference_of_statistics" in checks:
        words.append(f"statistics within {checks['largest_relative_difference_of_statistics']:.0e} of those alone")
    if "share_of_equal_masks" in checks:
        words.append(f"{100 * checks['share_of_equal_masks']:.3f} % of the masks as alone")
    return ", ".join(words)
