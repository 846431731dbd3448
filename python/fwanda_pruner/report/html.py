"""The HTML report: one page that shows runs side by side, without scripts and without anything from a network."""

from __future__ import annotations

from pathlib import Path

from ..errors import UserError, install_hint, refuse_pipe, shortened, visible
from ..formats.files import atomic_file, check_file
from . import page
from .record import Report
from .summary import shows_wanda, skipped_lines

_TEMPLATE = "page.html.j2"
_MARK = '<meta name="generator" content="fwanda report">'  # in the first _HEAD characters of the template's page
_HEAD = 1000
_SHADES = 48  # colours of a heat map
_DRAWN = 8  # runs in one chart


def write_html(reports: dict[str, Report], path: str | Path) -> None:
    """Writes one self-contained HTML page about one or several runs.

    The page appears whole or not at all. Its size hardly grows with the number of matrices: it shows blocks and kinds
    of matrix.

    Args:
        reports: what to call a run -> its record; at least one.
        path: the file to write; an existing page of this function is replaced.

    Raises:
        UserError: jinja2 or matplotlib is missing, there is no report, the file cannot be written, or another file has
            its name.
    """
    path = check_file(path, ".html", flag="--html")
    if path.exists() and not _is_page(path):
        raise UserError(f"--html {path} exists and was not written by fwanda report; choose another name")
    if not reports:
        raise UserError("the HTML report needs at least one record of a run, got none; name a folder of fwanda prune")
    text = render(reports)
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="replace")  # names of files may hold any bytes


def _is_page(path: Path) -> bool:
    """Whether a file begins as the page of write_html() does."""
    refuse_pipe(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        return _MARK in file.read(_HEAD)


def render(reports: dict[str, Report]) -> str:
    """The page of write_html() as text."""
    try:
        import jinja2

        from .charts import Charts, shades
    except ImportError as error:
        raise UserError(
            f"the HTML report needs jinja2 and matplotlib ({error}); {install_hint('jinja2', 'matplotlib')}"
        ) from error

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": page.percent, "perplexity": page.perplexity, "short": shortened}
    return environment.get_template(_TEMPLATE).render(_values(reports, Charts()), shades=shades(_SHADES)).lstrip()


def _visible(value):
    """A value of the template; characters of a text that control how others are shown become U+FFFD."""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _values(reports: dict[str, Report], charts) -> dict:
    """The variables of the template."""
    runs = page.runs_of(reports)
    sparsities = {run.number: page.sparsity_map(run) for run in runs if run.pruned}
    disagreements = {run.number: heat_map for run in runs if (heat_map := page.disagreement_map(run)) is not None}
    return {
        "runs": runs,
        "perplexities": page.perplexity_groups(runs),
        "domains": page.domain_groups(runs),
        "loss_columns": {
            "dense": "dense",
            **({"wanda": "Wanda's masks"} if shows_wanda(reports.values()) else {}),
            "pruned": "pruned",
            "increase": "increase",
        },
        "sparsity": {"maps": sparsities, "scale": page.scale_of(sparsities.values())},
        "disagreement": _disagreement(disagreements, charts),
        "histograms": [_histogram(run, charts) for run in runs if sum(run.report.row_histogram or ())],
        "searches": [
            {"run": run, "svg": charts.search(run.search, _search_alt(run))} for run in runs if run.search is not None
        ],
        "stages": page.stage_rows(runs),
        "settings": page.settings_rows(runs),
        "versions": list(dict.fromkeys(name for run in runs for name in run.report.versions)),
        "skipped": {run.number: skipped_lines([row for row in run.report.matrices if row.skipped]) for run in runs},
        "warnings": page.grouped((warning, run) for run in runs for warning in run.report.warnings),
        "energies": page.grouped((page.energy_in_words(run), run) for run in runs),
        "shade_count": _SHADES,
    }


def _histogram(run: page.Run, charts) -> dict:
    caption = page.rows_in_words(run.report.row_histogram, run.kept)
    svg = charts.histogram(run.report.row_histogram, run.kept, run.number, f"Histogram of run {run.number}. {caption}")
    return {"run": run, "caption": caption, "svg": svg}


def _disagreement(maps: dict[int, page.HeatMap], charts) -> dict | None:
    """The lines over the blocks, and the heat maps that say the same in numbers."""
    if not maps:
        return None
    lines = {number: page.means_by_block(heat_map) for number, heat_map in maps.items()}
    lines = {number: values for number, values in lines.items() if any(values.values())}
    drawn = dict(list(lines.items())[:_DRAWN])
    means = ", ".join(
        f"run {number} {page.percent(min(values.values()))} to {page.percent(max(values.values()))}"
        for number, values in drawn.items()
    )
    alt = f"Lines over the blocks: share of mask entries unlike Wanda's. {means}."
    svg = charts.by_block(drawn, "unlike Wanda's mask", alt) if drawn else None
    return {"maps": maps, "scale": page.scale_of(maps.values()), "svg": svg, "undrawn": len(lines) - len(drawn)}


def _search_alt(run: page.Run) -> str:
    means = run.search.means
    increases = [f"{shortened(name)} {mean:.3f}" for name, mean in means.items() if mean is not None]
    return (
        f"Dot plot of run {run.number}: mean increase of the loss in nats by the masks that were tried. "
        f"{', '.join(increases[:40])}. Chosen: {shortened(run.search.chosen)}."
    )
