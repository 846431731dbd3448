"""Write what `make test-gpu` found into docs/reliability.md.

    python tests/gpu_results.py --machine    prints the card and the versions, on one line
    python tests/gpu_results.py JUNIT.xml    writes the section

The tests run with that line as the name of the suite (`-o junit_suite_name=...`). So the file says where they ran, and
the section can be written on another machine.
"""

from __future__ import annotations

import argparse
import re
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- gpu tests: begin -->\n", "<!-- gpu tests: end -->\n"
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}  # tag inside a case: outcome


def machine() -> str:
    """Card, memory, driver and versions, as the benchmarks name them; "no CUDA device" without one."""
    import sys

    sys.path.insert(0, str(PAGE.parent.parent / "benchmarks"))
    import torch
    from lib.machine import driver, triton_version

    if not torch.cuda.is_available():
        return "no CUDA device"
    versions = {"driver": driver(), "torch": torch.__version__, "Triton": triton_version()}
    return ", ".join([torch.cuda.get_device_name(), *(f"{name} {v}" for name, v in versions.items() if v)])


def section(junit: Path) -> str:
    """Markdown: one sentence, and a table of what was skipped or failed, with the reasons."""
    suite = next(ET.parse(junit).getroot().iter("testsuite"))
    counts: Counter[str] = Counter()
    reasons: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # (outcome, reason) -> file: cases
    on_gpu = 0
    for case in suite.iter("testcase"):
        name = case.get("classname") or case.get("name", "")  # a file that was skipped as a whole has no class
        file = name.replace("tests.", "", 1).split(".")[0]
        found = next((child for child in case if child.tag in OUTCOMES), None)
        outcome = "passed" if found is None else OUTCOMES[found.tag]
        counts[outcome] += 1
        on_gpu += outcome == "passed" and (file.startswith("test_cuda") or "on_gpu" in case.get("name", ""))
        if found is not None:
            reasons[outcome, reason(found.get("message", ""))][file] += 1
    minutes = float(suite.get("time", 0)) / 60
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "skipped", "failed"))
    lines = [
        f"{suite.get('name')}, {suite.get('timestamp', '')[:10]}: {told}, in {minutes:.1f} minutes. {on_gpu} of those "
        f"that passed run kernels or the pruner on the GPU.",
        "",
        "| outcome | cases | why | where |",
        "|---|---|---|---|",
    ]
    for (outcome, why), files in sorted(reasons.items(), key=lambda item: (item[0][0], -item[1].total())):
        where = ", ".join(f"`{file}.py`" for file in sorted(files))
        lines.append(f"| {outcome} | {files.total()} | {why} | {where} |")
    return "\n".join(lines if reasons else lines[:1]) + "\n"


def reason(message: str) -> str:
    """One short line that may stand in a cell."""
    line = " ".join(message.removeprefix("Skipped: ").split()).replace("|", "\\|")
    line = re.sub(r"(/[\w.-]+){2,}", "...", line)  # a path of the machine
    return line if len(line) <= 120 else line[:117] + "..."


def write(junit: Path, page: Path = PAGE) -> None:
    """Raises ValueError: the page has no place for the section, or the tests ran without a GPU."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page.name} has no lines {BEGIN.strip()} and {END.strip()}")
    made = section(junit)
    if made.startswith("no CUDA device"):
        raise ValueError(f"{junit.name} is of a machine without a GPU; the page stays as it is")
    page.write_text(before + begin + made + end + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("junit", type=Path, nargs="?", metavar="JUNIT.xml", help="what pytest --junitxml wrote")
    parser.add_argument("--machine", action="store_true", help="print the card and the versions instead")
    args = parser.parse_args()
    if args.machine:
        print(machine())
    elif args.junit is None:
        parser.error("name the file that pytest --junitxml wrote")
    else:
        try:
            write(args.junit)
        except (OSError, ValueError, ET.ParseError, StopIteration) as error:
            parser.error(f"{args.junit}: {error}")


if __name__ == "__main__":
    main()
