"""Reports as text: a table that compares runs, and the summary that closes a run."""

import importlib.util
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ..errors import shortened, visible
from ..source_shares import counts_of
from .record import FILE_NAME, MatrixRow, Report

_DOMAINS = "mean loss in nats on text of several domains, before and after pruning"
_WIDTH, _INDENT = 80, 12  # of the summary: columns of a terminal, and of its labels
_MOST = {"perplexity": 4, "  ": 8, "skipped": 3, "warnings": 3}  # lines of a kind in the summary; fwanda.json has all
_LONGEST_NAME, _LONGEST_WARNING = 20, 200


def table(reports: list[tuple[str, Report]]) -> str:
    """Aligned tables of reports, with a column for each evaluation text; one table for each evaluation protocol.

    Perplexities of different protocols never share a table. Rows keep their order. Where a run was compared on several
    domains, a last table has a row for each of them.

    Args:
        reports: (label, report) of each run.
    """
    groups: dict[tuple[str, ...], list[tuple[str, Report]]] = {}
    for label, report in reports:
        protocols = tuple(visible(f"{text['source']}: {protocol_line(text)}") for text in report.perplexity)
        groups.setdefault(protocols, []).append((label, report))
    titles = {protocols: _title(rows[0][1]) for protocols, rows in groups.items()}
    several = Counter(titles.values())
    tables = [
        f"{titles[protocols] if several[titles[protocols]] == 1 else chr(10).join(protocols)}\n{_grid(rows)}"
        for protocols, rows in groups.items()
    ]
    compared = [(label, report) for label, report in reports if report.domains]
    if compared:
        tables.append(f"{_DOMAINS}\n{_domain_grid(compared)}{_comparable(compared)}")
    return "\n\n".join(tables)


def _comparable(rows: list[tuple[str, Report]]) -> str:
    """A line about runs that were compared on other windows of the same text; empty if there are none."""
    dense: dict[str, set] = {}
    for _, report in rows:
        for domain in report.domains:
            dense.setdefault(domain["source"], set()).add(domain["dense"])
    several = any(len(losses) > 1 for losses in dense.values())
    return "\nCompare runs with the same dense loss: the others read other windows." if several else ""


def shows_wanda(reports: Iterable[Report]) -> bool:
    """Whether a report has a loss with Wanda's masks that is not that of the result itself."""
    return any(domain["wanda"] not in (None, domain["pruned"]) for report in reports for domain in report.domains)


def _title(report: Report) -> str:
    """How the perplexities of a report were measured, for a person: without hashes and names of classes."""
    return (
        "\n".join(visible(f"{text['source']}: {_windows(text)}") for text in report.perplexity)
        or "perplexity not measured"
    )


def _windows(text: dict) -> str:
    bos = {True: "BOS in each", False: "no BOS", None: "token ids as given"}[text["bos"]]
    return f"{text['windows']} windows of {text['seqlen']} tokens, {bos}"


def protocol_line(text: dict) -> str:
    """How a perplexity was measured, with all that makes it comparable to another.

    Args:
        text: {seqlen, windows, tokens_sha256, bos, tokenizer}, as in Report.perplexity.
    """
    bos = {True: "in each window", False: "none", None: "as in the token ids"}[text["bos"]]
    tokenizer = text["tokenizer"]
    parts = [
        f"{text['windows']} windows of {text['seqlen']}",
        f"BOS {bos}",
        f"tokens {text['tokens_sha256']:.12}",
    ]
    return ", ".join(parts + [f"tokenizer {tokenizer}"] * (tokenizer is not None))


def summary(report: Report) -> str:
    """The result of a run in a few lines of at most 80 columns, unless a name is longer: it fits a screen.

    Sparsity, coverage, what a search chose, the text, perplexity, losses, cost, the matrices that were skipped, and the
    first warnings.
    """
    skipped = [row for row in report.matrices if row.skipped is not None]
    wanda = ", and with Wanda's masks" if shows_wanda([report]) else ""
    sparsity, coverage = report.sparsity, report.coverage
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report.seconds.items())
    parts = [
        (
            "sparsity",
            f"{_percent(sparsity['matrices'])} of {len(report.matrices) - len(skipped)} pruned matrices"
            f" (asked {100 * report.asked:.4g} %), {_percent(sparsity['model'])} of the model",
        ),
        (
            "coverage",
            f"pruned matrices hold {_percent(coverage['blocks'])} of the blocks, {_percent(coverage['model'])} of the"
            " model",
        ),
        ("allocation", f"{report.config['allocation']} chose {chosen}" if (chosen := _chosen(report)) else ""),
        ("text", _calibration(report)),
        *_first(
            "perplexity",
            [f"{_change(t)} on {_short(t['source'])}  ({_windows(t)})" for t in report.perplexity],
        ),
        ("losses", f"mean in nats: dense -> pruned{wanda}" if report.domains else ""),
        *_first("  ", _losses(report)),
        ("refit", _refit(report)),
        ("seconds", f"{sum(report.seconds.values()):.1f} ({stages})"),
        ("memory", f"{report.peak_memory_bytes / 2**30:.2f} GiB peak"),
        ("energy", _energy(report)),
        *_first("skipped", skipped_lines(skipped)),
        *_first("warnings", [shortened(warning, _LONGEST_WARNING) for warning in report.warnings]),
    ]
    return "\n".join(_labelled(label, text) for label, text in parts if text)


def next_commands(report: Report, output: str) -> list[str]:
    """Commands that a person may want to run after pruning, to copy.

    Args:
        output: the folder of the result.
    """
    config, folder = report.config, shlex.quote(str(output))
    if report.perplexity:
        texts = [text["source"] for text in report.perplexity]
        settings = {"--eval-seqlen": config.get("eval_seqlen"), "--eval-windows": config.get("eval_windows")}
    else:
        texts, settings = ["sample"], {"--eval-seqlen": 256, "--eval-windows": 8}  # a few seconds on a CPU
    flags = [f"--eval {shlex.quote(text)}" for text in texts] + [f"{key} {n}" for key, n in settings.items() if n]
    page = f"fwanda report {folder} --html {shlex.quote(str(Path(output)) + '.html')}"
    return [
        f"fwanda report {folder}",
        *[page] * all(importlib.util.find_spec(module) for module in ("jinja2", "matplotlib")),
        f"fwanda eval {folder} {' '.join(flags)}",
    ]


def _labelled(label: str, text: str) -> str:
    """A label and its text, wrapped."""
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=label if label.isspace() else f"{label:{_INDENT}}",
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _first(label: str, texts: list[str]) -> list[tuple[str, str]]:
    """The first texts of a kind under a label, and how many more there are."""
    shown = texts[: _MOST[label]]
    if len(texts) > len(shown):
        shown.append(f"and {len(texts) - len(shown)} more in {FILE_NAME}")
    return [(label, text) for text in shown]


def _chosen(report: Report) -> str:
    """What a search chose, such as "round 2 of response"; empty without a search."""
    name = (report.config.get("chosen") or {"name": ""})["name"]
    return f"{name} of response" if name.startswith("round ") and report.config.get("allocation") == "auto" else name


def _calibration(report: Report) -> str:
    """How many windows each source of the calibration got; empty if the run used none."""
    config, sources = report.config, report.sources
    if report.tokens_sha256 is None or not sources or not isinstance(config.get("nsamples"), int):
        return ""
    windows = f"{config['nsamples']} windows of {config.get('seqlen')} tokens"
    names = [_short(source.name) for source in sources]
    if len(sources) == 1:
        return f"{windows} from {names[0]}"
    counts = counts_of(sources, config["nsamples"])
    return f"{windows}: {', '.join(f'{name} {count}' for name, count in zip(names, counts, strict=True))}"


def _short(source: str) -> str:
    """The name of a text in few columns; of a long path, the file."""
    return shortened(source if len(source) <= _LONGEST_NAME else Path(source).name, _LONGEST_NAME)


def _losses(report: Report) -> list[str]:
    """Loss of the dense and the pruned model on each domain, beside that of Wanda's masks if it is another."""
    shown = shows_wanda([report])
    wanda = [f"  Wanda {_loss(domain['wanda'])}" if shown else "" for domain in report.domains]
    names = [_short(domain["source"]) for domain in report.domains]
    width = max(map(len, names), default=0)
    return [
        f"{name:{width}}  {_loss(domain['dense'])} -> {_loss(domain['pruned'])}{other}  {windows_of(domain)}"
        for name, other, domain in zip(names, wanda, report.domains, strict=True)
    ]


def windows_of(domain: dict) -> str:
    """Whether calibration read the text of a domain, and these windows of it."""
    if not domain["calibrated"]:
        return f"{domain['windows']} windows of other text"
    return f"{domain['windows']} {'held-out' if domain['unread'] else 'calibration'} windows"


def _reading(domain: dict) -> str:
    """Whether the calibration read the text of a domain, and these windows of it."""
    if not domain["calibrated"]:
        return "not calibrated on"
    return f"calibrated on {'other' if domain['unread'] else 'these'} windows"


def _refit(report: Report) -> str:
    if report.refit is None:
        return ""
    kept, blocks = report.refit["kept"], report.refit["blocks"]
    return f"updates kept in {kept} of {blocks} blocks, where the held-out loss fell"


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"


def skipped_lines(rows: list[MatrixRow]) -> list[str]:
    """One line for each reason: the first matrix, the number of others, their weights, and the reason.

    Args:
        rows: matrices that were skipped.
    """
    by_reason: dict[str, list[MatrixRow]] = {}
    for row in rows:
        by_reason.setdefault(row.skipped, []).append(row)
    return [
        f"{same[0].name}{f' and {len(same) - 1} more' if len(same) > 1 else ''}"
        f" ({sum(row.numel for row in same)} weights): {reason}"
        for reason, same in by_reason.items()
    ]


def _grid(rows: list[tuple[str, Report]]) -> str:
    texts = [f"perplexity {text['source']}" for text in rows[0][1].perplexity]
    cells = [("model", "method", "allocation", "sparsity", *texts, "seconds")]
    for label, report in rows:
        method = " ".join(str(report.config[key]) for key in ("method", "pattern") if report.config.get(key))
        cells.append((
            label,
            method or "-",
            str(report.config.get("allocation") or "-") + (f" ({chosen})" if (chosen := _chosen(report)) else ""),
            _percent(report.sparsity["matrices"]),
            *map(_change, report.perplexity),
            f"{sum(report.seconds.values()):.1f}",
        ))  # fmt: skip
    return _aligned(cells)


def _domain_grid(rows: list[tuple[str, Report]]) -> str:
    """A row for each domain; the label of a run stands in the first of its rows."""
    wanda = shows_wanda(report for _, report in rows)
    keys = ["dense", *["wanda"] * wanda, "pruned"]
    cells = [("model", "text", *({"wanda": "Wanda's masks"}.get(key, key) for key in keys), "windows", "note")]
    for label, report in rows:
        for number, domain in enumerate(report.domains):
            losses = (_loss(domain[key]) for key in keys)
            first = "" if number else label
            cells.append((first, domain["source"], *losses, str(domain["windows"]), _reading(domain)))
    return _aligned(cells)


def _aligned(cells: list[tuple[str, ...]]) -> str:
    """Rows of equal length as lines, each column as wide as its longest cell."""
    cells = [tuple(map(visible, row)) for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def _change(text: dict) -> str:
    return f"{text['dense']:.2f} -> {text['pruned']:.2f}"


def _energy(report: Report) -> str:
    if isinstance(report.energy, str):
        return report.energy
    total = report.energy_details["total"]
    net = "" if total["net_joules"] is None else f", {total['net_joules']:.0f} J net"
    flag = "" if total["flag"] is None else f" ({total['flag']})"
    return f"{report.energy:.0f} J gross{net}{flag}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
