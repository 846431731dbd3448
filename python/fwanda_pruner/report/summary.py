"""Reports as text: a table that compares runs, and the summary that closes a run."""

from .record import MatrixRow, Report

_DOMAINS = "mean loss in nats on text of several domains, before and after pruning"


def table(reports: list[tuple[str, Report]]) -> str:
    """Aligned tables of reports, with a column for each evaluation text; one table for each evaluation protocol.

    Perplexities of different protocols never share a table. Rows keep their order. Where a run was compared on several
    domains, a last table has a row for each of them.

    Args:
        reports: (label, report) of each run.
    """
    groups: dict[str, list[tuple[str, Report]]] = {}
    for label, report in reports:
        protocols = [f"{text['source']}: {protocol_line(text)}" for text in report.perplexity]
        groups.setdefault("\n".join(protocols or ["perplexity not measured"]), []).append((label, report))
    tables = [f"{protocols}\n{_grid(rows)}" for protocols, rows in groups.items()]
    compared = [(label, report) for label, report in reports if report.domains]
    return "\n\n".join([*tables, f"{_DOMAINS}\n{_domain_grid(compared)}"] if compared else tables)


def protocol_line(text: dict) -> str:
    """How a perplexity was measured.

    Args:
        text: {seqlen, windows, tokens_sha256, bos, tokenizer}, as in Report.perplexity.
    """
    bos, tokenizer = text["bos"], text["tokenizer"]
    parts = [
        f"{text['windows']} windows of {text['seqlen']}",
        f"BOS {'in each window' if bos else 'none'}",
        f"tokens {text['tokens_sha256']:.12}",
    ]
    return ", ".join(parts + [f"tokenizer {tokenizer}"] * (tokenizer is not None))


def summary(report: Report) -> str:
    """The result of a run in a few lines: sparsity, coverage, perplexity, cost, and the matrices that were skipped."""
    skipped = [row for row in report.matrices if row.skipped is not None]
    sparsity, coverage = report.sparsity, report.coverage
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report.seconds.items())
    lines = [
        f"sparsity    {_percent(sparsity['matrices'])} of {len(report.matrices) - len(skipped)} pruned matrices"
        f" (asked {_percent(sparsity['asked'])}), {_percent(sparsity['model'])} of the model",
        f"coverage    {_percent(coverage['blocks'])} of the block parameters lie in pruned matrices,"
        f" {_percent(coverage['model'])} of the model's",
        *(f"perplexity  {_change(text)} on {text['source']}  ({protocol_line(text)})" for text in report.perplexity),
        *_domain_lines(report),
        *_refit_lines(report),
        f"seconds     {sum(report.seconds.values()):.1f} ({stages})",
        f"memory      {report.peak_memory_bytes / 2**30:.2f} GiB peak",
        f"energy      {_energy(report)}",
    ]
    return "\n".join(lines + [f"skipped     {line}" for line in skipped_lines(skipped)])


def _domain_lines(report: Report) -> list[str]:
    """Loss of the dense and the pruned model on each domain, beside that of Wanda's masks."""
    return [
        f"domain      {domain['source']}: loss {_loss(domain['dense'])} -> {_loss(domain['pruned'])} nats,"
        f" with Wanda's masks {_loss(domain['wanda'])}  ({domain['windows']} windows, {_reading(domain)})"
        for domain in report.domains
    ]


def _reading(domain: dict) -> str:
    """Whether the calibration read the text of a domain, and these windows of it."""
    if not domain["calibrated"]:
        return "not calibrated on"
    return f"calibrated on {'other' if domain['unread'] else 'these'} windows"


def _refit_lines(report: Report) -> list[str]:
    if report.refit is None:
        return []
    refit = report.refit
    return [f"refit       updates kept in {refit['kept']} of {refit['blocks']} blocks, where the held-out loss fell"]


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
            str(report.config.get("allocation") or "-"),
            _percent(report.sparsity["matrices"]),
            *map(_change, report.perplexity),
            f"{sum(report.seconds.values()):.1f}",
        ))  # fmt: skip
    return _aligned(cells)


def _domain_grid(rows: list[tuple[str, Report]]) -> str:
    """A row for each domain; the label of a run stands in the first of its rows."""
    cells = [("model", "text", "dense", "Wanda's masks", "pruned", "windows", "")]
    for label, report in rows:
        for number, domain in enumerate(report.domains):
            losses = (_loss(domain[key]) for key in ("dense", "wanda", "pruned"))
            first = "" if number else label
            cells.append((first, domain["source"], *losses, str(domain["windows"]), _reading(domain)))
    return _aligned(cells)


def _aligned(cells: list[tuple[str, ...]]) -> str:
    """Rows of equal length as lines, each column as wide as its longest cell."""
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
