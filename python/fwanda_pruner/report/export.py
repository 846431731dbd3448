"""Reports of several runs for other programs: CSV with one row for each run, and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Mapping

from .record import Report
from .summary import protocol_line

_SETTINGS = ("model", "method", "allocation", "pattern", "order", "seed")


def as_json(reports: Mapping[str, Report]) -> str:
    """A JSON list of the records, each with its `path`."""
    return json.dumps([{"path": path, **report.to_dict()} for path, report in reports.items()], indent=1)


def as_csv(reports: Mapping[str, Report]) -> str:
    """CSV: a header, and a row for each report. What a run did not measure is empty.

    A perplexity has two columns for each text. Where runs measured one text by several protocols, the columns are apart
    and name the protocol.
    """
    protocols = {(text["source"], protocol_line(text)) for report in reports.values() for text in report.perplexity}
    several = Counter(source for source, _ in protocols)
    rows = [_row(path, report, several) for path, report in reports.items()]
    columns = dict.fromkeys(column for row in rows for column in row)
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")


def _row(path: str, report: Report, several: Mapping[str, int]) -> dict:
    row = {"path": path} | {key: report.config.get(key) for key in _SETTINGS}
    row |= {f"sparsity {key}": value for key, value in report.sparsity.items()}
    for text in report.perplexity:
        name = text["source"] if several[text["source"]] == 1 else f"{text['source']} ({protocol_line(text)})"
        row |= {f"perplexity {name} {which}": text[which] for which in ("dense", "pruned")}
    for domain in report.domains:
        row |= {f"loss {domain['source']} {which}": domain[which] for which in ("dense", "wanda", "pruned")}
    row |= {"seconds": round(sum(report.seconds.values()), 3), "peak_memory_bytes": report.peak_memory_bytes}
    return row | {"joules": None if isinstance(report.energy, str) else report.energy, "warnings": len(report.warnings)}
