"""The HTML report: what it says, that names of files cannot change it, and what it refuses."""

import html
import re
import sys

import pytest
from reports import KINDS, SEARCH, domain, matrices, perplexity, record

from fwanda_pruner.errors import UserError
from fwanda_pruner.report.html import write_html
from fwanda_pruner.report.page import (
    grouped,
    means_by_block,
    place_of,
    rows_in_words,
    runs_of,
    scale_of,
    sparsity_map,
    spike_limit,
)
from fwanda_pruner.report.record import ROW_BINS, MatrixRow


def page_of(tmp_path, *reports, **named) -> str:
    """The source of a page about these reports."""
    path = tmp_path / "page.html"
    write_html({f"run{i}": report for i, report in enumerate(reports)} | named, path)
    return path.read_text(encoding="utf-8")


def words(source: str) -> str:
    """The text of a page, or of a part of it, on one line."""
    without = re.sub(r"<(style|svg).*?</\1>", " ", source, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", without)).split())


def section(source: str, name: str) -> str:
    return source.split(f'<h2 id="{name}">')[1].split("</section>")[0]


def rows_of(source: str) -> list[list[str]]:
    """The cells of each table row, as text."""
    return [
        [words(cell) for cell in re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", row, re.DOTALL)]
        for row in re.findall(r"<tr\b.*?</tr>", source, re.DOTALL)
    ]


def test_one_sentence_says_what_was_done(tmp_path):
    assert (
        "F-Wanda (auto) set 67.5 % of the weights in 16 matrices of org/model-7b to zero, 47.2 % of the whole model; "
        "perplexity on wikitext2 rose from 20.00 to 30.00 and perplexity on code rose from 6.00 to 7.50."
    ) in words(page_of(tmp_path, record()))
    assert "67.5 % asked 70.0 %" in words(page_of(tmp_path, record()))


def test_a_perplexity_that_is_not_finite_and_one_that_was_not_measured_are_said(tmp_path):
    broken = record(perplexity=[perplexity("code", 6.0, float("inf"))])
    assert "perplexity on code was 6.00 before and is not finite after." in words(page_of(tmp_path, broken))
    assert "its perplexity was not measured" in words(page_of(tmp_path, record(perplexity=[])))


def test_quality_has_perplexities_and_the_losses_of_domains(tmp_path):
    source = section(page_of(tmp_path, record()), "quality")
    rows = rows_of(source)
    assert ["wikitext2 3 windows of 64 tokens, each after BOS (SHA-256 abababababab)", "20.00", "30.00", "1.50"] in rows
    assert ["c4 8 held-out windows", "2.000", "2.500", "2.250", "+0.250", ""] in rows
    assert ["code 8 windows of other text", "2.000", "-", "-", "-", ""] in rows
    assert "Updates of the weights were kept in 3 of 4 blocks" in words(source)


def test_losses_with_wandas_masks_are_left_out_where_the_result_has_the_same(tmp_path):
    same = [{**domain, "wanda": domain["pruned"]} for domain in record().domains]
    assert "Wanda's masks" not in words(section(page_of(tmp_path, record(domains=same)), "quality"))
    assert "Wanda's masks" in words(section(page_of(tmp_path, record()), "quality"))


def test_sparsity_has_a_field_for_each_block_and_kind(tmp_path):
    head, *rows = rows_of(section(page_of(tmp_path, record()), "sparsity"))
    assert head == ["block", "q_proj", "o_proj", "up_proj", "down_proj", "all"]
    for block, row in enumerate(rows):
        shares = [1 - (10 + block + kind) / 40 for kind in range(len(KINDS))]
        assert row == [str(block), *(f"{100 * share:.0f}" for share in (*shares, sum(shares) / 4))]


def test_fields_have_the_colour_of_their_share(tmp_path):
    source = section(page_of(tmp_path, record()), "sparsity")
    fields = re.findall(r'<td class="h(\d+)"[^>]*>\s*(\d+)</td>', source)
    by_share = sorted((int(share), int(shade)) for shade, share in fields)
    assert len(by_share) == 20 and len({shade for _, shade in by_share}) > 5
    assert [shade for _, shade in by_share] == sorted(shade for _, shade in by_share)


def test_cost_has_seconds_and_joules_of_each_stage(tmp_path):
    source = section(page_of(tmp_path, record()), "cost")
    assert rows_of(source)[1:] == [
        ["load the model", "3.0", "", "-"],
        ["calibrate", "10.0", "", "1,234"],
        ["choose the allocation", "20.5", "", "-"],
        ["prune", "2.0", "", "-"],
        ["total", "35.5", "", "5,000"],
    ]
    assert "Energy of calibration, search and pruning: 5,000 J gross, 4,000 J net of the idle power." in words(source)


def test_the_search_has_a_row_for_each_candidate_and_round(tmp_path):
    source = section(page_of(tmp_path, record()), "search")
    assert rows_of(source) == [
        ["masks", "c4", "code", "mean increase"],
        ["dense", "3.000", "2.000", "-"],
        ["wanda", "4.000", "2.500", "+0.750"],
        ["global b=1 c=0.5", "3.500", "2.500", "+0.500"],
        ["round 2 (chosen)", "3.250", "2.250", "+0.250"],
        ["round 4", "3.500", "not finite", "-"],
    ]
    (label,) = re.findall(r'aria-label="(Dot plot[^"]*)"', source)
    assert "wanda 0.750, global b=1 c=0.5 0.500, round 2 0.250. Chosen: round 2." in label


def test_environment_warnings_and_skipped_matrices(tmp_path):
    source = page_of(tmp_path, record())
    rows = rows_of(section(source, "environment"))
    for row in (["torch", "2.13"], ["triton", "not installed"], ["kernels", "cuda for 2 ops, triton for 1 ops"]):
        assert row in rows
    assert "lm_head (50 weights): tied" in words(section(source, "environment"))
    assert "nsamples is small" in words(section(source, "warnings"))


def test_runs_stand_side_by_side(tmp_path):
    other = record(config=record().config | {"method": "wanda", "allocation": "uniform", "chosen": None}, refit=None)
    source = page_of(tmp_path, first=record(), second=other)
    assert "2 pruning runs compared" in words(source)
    rows = rows_of(section(source, "settings"))
    assert rows[0] == ["setting", "1", "2"] and ["method", "fwanda", "wanda"] in rows
    starred = re.findall(r'<tr class="differs"><th scope="row">(\w+)', section(source, "settings"))
    assert starred == ["method", "allocation"]
    assert section(source, "sparsity").count('class="heat"') == 2
    assert ["1 F-Wanda (auto)", "20.00", "30.00", "1.50"] in rows_of(section(source, "quality"))
    assert "1 2 nsamples is small" in words(section(source, "warnings"))


@pytest.mark.fault("protocol")
def test_perplexities_of_different_protocols_stand_in_different_groups(tmp_path):
    other = record(perplexity=[perplexity("wikitext2", windows=5), perplexity("code", 6.0, 7.5)])
    rows = rows_of(section(page_of(tmp_path, record(), other), "quality"))
    assert [row[0].split()[0] for row in rows if len(row) == 1] == ["wikitext2", "code", "wikitext2", "c4", "code"]


def test_a_record_of_an_older_version_has_a_page_without_what_it_does_not_know(tmp_path):
    rows = [MatrixRow(row.name, row.shape, row.asked, row.kept, 0) for row in matrices()]
    config = record().config | {"chosen": None}
    old = record(
        matrices=rows, row_histogram=None, backends=None, refit=None, config=config, energy="not measured: old"
    )
    source = page_of(tmp_path, old)
    assert not any(f'id="{name}"' in source for name in ("rows", "wanda", "search"))
    assert "Energy: not measured: old." in words(source) and 'id="sparsity"' in source


def test_a_run_without_anything_has_a_page(tmp_path):
    empty = record(
        matrices=[], perplexity=[], domains=[], seconds={}, versions={}, warnings=[], config={}, refit=None,
        backends=None, row_histogram=[0] * ROW_BINS, energy="no", energy_details={},
    )  # fmt: skip
    assert "set 0.0 % of the weights in 0 matrices of a model without a name" in words(page_of(tmp_path, empty))


EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&$x_1${{ 7 * 7 }}{% raw %}|`\x00\x1b\u202e\ud800日本"


def evil_record():
    losses = {"dense": {EVIL: 1.0, "mean": 1.0}, EVIL: {EVIL: 2.0, "mean": 2.0}}
    return record(
        config={name: EVIL for name in ("model", "method", "allocation", "pattern", "dtype")}
        | {"calibration": [EVIL], EVIL: EVIL, "chosen": {"name": EVIL, "start": EVIL, "losses": losses}},
        matrices=[MatrixRow(f"{EVIL}.3.{EVIL}", (4, 10), 10, 10, 0, wanda_disagreement=0.5)],
        perplexity=[perplexity(EVIL, tokenizer=EVIL)],
        domains=[domain(EVIL)],
        seconds={EVIL: 1.0},
        versions={EVIL: EVIL},
        warnings=[EVIL],
        energy=EVIL,
        backends={"op": EVIL},
    )


@pytest.mark.fault("names in a page")
@pytest.mark.parametrize("count", [1, 2])
def test_no_name_becomes_markup(tmp_path, count):
    source = page_of(tmp_path, **{EVIL: evil_record()}, **{str(i): evil_record() for i in range(1, count)})
    assert not re.search(r"<(script|img)|onerror=alert\(2\)>(?!&)[\"']", source)
    assert "&lt;script&gt;" in source and "7 * 7" in source and "49" not in words(section(source, "warnings"))
    assert not set("\x00\x1b\u202e\ud800") & set(source)


@pytest.mark.fault("page size")
def test_many_matrices_are_a_small_page(tmp_path):
    experts = [
        MatrixRow(
            f"model.layers.{b}.mlp.experts.{e}.{kind}", (4, 10), 10 + e % 2, 10 + e % 2, 0, wanda_disagreement=0.1
        )
        for b in range(40)
        for e in range(200)
        for kind in ("up_proj", "down_proj")
    ]
    source = page_of(tmp_path, record(matrices=experts))
    assert len(source) < 300_000
    assert source.count("200 matrices, 72.5 % to 75.0 %") == 80
    assert rows_of(section(source, "sparsity"))[1] == ["0", "74", "74", "74"]


def test_blocks_and_kinds_beyond_the_limit_are_counted(tmp_path):
    rows = [MatrixRow(f"h.{b}.kind{b}", (4, 10), 10, 10, 0) for b in range(300)]
    source = page_of(tmp_path, record(matrices=rows))
    assert "180 more blocks and 276 more kinds of matrix are not shown." in words(section(source, "sparsity"))


def test_the_page_loads_nothing_and_runs_nothing(tmp_path):
    source = page_of(tmp_path, record(), record())
    assert "default-src 'none'" in source and "<script" not in source and "@import" not in source
    assert all(place.startswith("#") for place in re.findall(r"url\(([^)]*)\)", source))
    linked = re.findall(r'(?:href|src)="([^"]*)"', source)
    assert linked and all(target.startswith("#") or target == "data:," for target in linked)


def test_every_picture_has_an_alternative_text_and_every_link_a_target(tmp_path):
    source = page_of(tmp_path, record(), record())
    pictures = re.findall(r"<svg\b[^>]*>", source)
    assert len(pictures) == 5 and all('role="img"' in p and re.search(r'aria-label="[^"]{30,}"', p) for p in pictures)
    ids = re.findall(r'\bid="([^"]*)"', source)
    assert len(ids) == len(set(ids))
    assert {target[1:] for target in re.findall(r'href="(#[^"]*)"', source)} <= set(ids)
    assert all("scope=" in head or 'class="bar"' in head for head in re.findall(r"<th\b[^>]*>", source))


def test_text_in_pictures_is_text_and_colours_are_those_of_the_page(tmp_path):
    pictures = "".join(re.findall(r"<svg\b.*?</svg>", page_of(tmp_path, record()), re.DOTALL))
    assert "weights kept in a row</text>" in pictures and "round 2, chosen</text>" in pictures
    assert "var(--series-1)" in pictures and "var(--ink)" in pictures and "#0000" not in pictures


@pytest.mark.parametrize("library", ["jinja2", "matplotlib"])
def test_a_missing_library_is_one_line_that_says_what_to_install(tmp_path, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, "fwanda_pruner.report.charts", raising=False)
    with pytest.raises(UserError, match=r"needs jinja2 and matplotlib.*pip install jinja2 matplotlib") as error:
        write_html({"a": record()}, tmp_path / "page.html")
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fwanda.json", "--html must be a .html file in an existing, writable folder"),
        ("page", "--html must be a .html file"),
        ("folder.html", "--html must be a .html file"),
        ("nowhere/page.html", "in an existing, writable folder"),
        ("x" * 300 + ".html", "its name has more than 200 bytes; choose a shorter one"),
        ("a\0.html", "is not a usable path"),
    ],
)
def test_a_file_that_cannot_be_written_is_one_line(tmp_path, name, message):
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(UserError, match=message) as error:
        write_html({"a": record()}, tmp_path / name)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


def test_no_report_is_refused(tmp_path):
    with pytest.raises(UserError, match="at least one record"):
        write_html({}, tmp_path / "page.html")


def test_a_page_that_fails_leaves_the_old_one(tmp_path):
    path = tmp_path / "page.html"
    write_html({"old": record()}, path)
    old = path.read_text()
    with pytest.raises(AttributeError):
        write_html({"a": object()}, path)
    assert path.read_text() == old and len(list(tmp_path.iterdir())) == 1
    write_html({"new": record(), "other": record()}, path)
    assert path.read_text() != old


@pytest.mark.fault("file of the user")
@pytest.mark.parametrize("content", [b"", b"<!DOCTYPE html><title>mine</title>", b"\xff\xfe"])
def test_a_file_of_the_user_is_never_replaced(tmp_path, content):
    path = tmp_path / "page.html"
    path.write_bytes(content)
    with pytest.raises(UserError, match="page.html exists and was not written by fwanda report; choose another name"):
        write_html({"a": record()}, path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.3.self_attn.q_proj", ("3", "self_attn.q_proj")),
        ("model.layers.11.mlp.experts.7.up_proj", ("11", "mlp.experts.up_proj")),
        ("transformer.h.0.attn.c_attn", ("0", "attn.c_attn")),
        ("head", ("-", "head")),
        ("layers.2", ("2", "layers")),
        ("a.².b", ("-", "a.².b")),
        ("a." + "9" * 5000 + ".b", ("-", "a." + "9" * 5000 + ".b")),
    ],
)
def test_a_name_has_a_block_and_a_kind(name, place):
    assert place_of(name) == place


def test_kinds_with_the_same_end_have_longer_names():
    names = ("h.0.attn.c_proj", "h.0.mlp.c_proj", "h.0.mlp.c_fc")
    (run,) = runs_of({"a": record(matrices=[MatrixRow(name, (4, 10), 10, 10, 0) for name in names])})
    assert sparsity_map(run).kinds == {"attn.c_proj": "attn.c_proj", "mlp.c_proj": "mlp.c_proj", "mlp.c_fc": "c_fc"}


def test_shares_of_unlike_matrices_count_their_weights():
    rows = [
        MatrixRow("h.0.a", (1, 10), 10, 10, 0),
        MatrixRow("h.0.b", (3, 10), 0, 0, 0),
        MatrixRow("b", (0, 4), 0, 0, 0),
    ]
    (run,) = runs_of({"a": record(matrices=rows)})
    assert means_by_block(sparsity_map(run)) == {0: 0.75}


def test_one_scale_serves_all_maps_and_is_never_narrow():
    (run,) = runs_of({"a": record()})
    assert scale_of([sparsity_map(run)]) == (0.55, 0.8)
    (wide,) = runs_of({"a": record(matrices=[MatrixRow("h.0.a", (4, 10), 38, 38, 0)])})
    assert scale_of([sparsity_map(run), sparsity_map(wide)]) == (0.05, 0.75)
    assert scale_of([]) == (0.0, 1.0)


def test_most_rows_are_told_within_the_bins():
    counts = [0] * ROW_BINS
    counts[25] = 20
    assert rows_in_words(counts, 0.5) == "All rows keep about 50 % of their weights."
    counts[30] = 1
    assert rows_in_words(counts, 0.5) == (
        "At least eight of ten rows keep 50 % to 52 % of their weights; the median row keeps 50 % to 52 %."
    )
    counts[0], counts[-1] = 4, 4
    assert "keep 0 % to 100 % of their weights; the median row keeps 50 % to 52 %" in rows_in_words(counts, 0.5)


@pytest.mark.parametrize(
    ("values", "limit"),
    [([], None), ([1.0], None), ([1.0, 1.1, 1.2], None), ([0.0, 0.0, 0.0], None), ([1.0, 2.0, 1.5, 100.0], 2.5)],
)
def test_a_spike_that_flattens_the_rest_has_a_limit(values, limit):
    assert spike_limit(values) == limit


def test_a_search_whose_candidate_is_far_worse_is_drawn_with_an_arrow(tmp_path):
    losses = SEARCH["losses"] | {"uniform": {"c4": 90.0, "code": 80.0}}
    config = record().config | {"chosen": SEARCH | {"losses": losses}}
    source = section(page_of(tmp_path, record(config=config)), "search")
    assert "mean 82.50 →</text>" in source


def test_the_same_text_of_several_runs_is_told_once():
    one, two = runs_of({"a": record(), "b": record()})
    assert grouped([("x", one), ("y", one), ("x", two), ("x", two)]) == {"x": [one, two], "y": [one]}
