"""Write the table of faults in docs/reliability.md from the markers on the tests.

    python tests/reliability.py           writes the table
    python tests/reliability.py --check   exits with 1 if the table in the file is another

A test that guards against a fault says so with a key of FAULTS: `@pytest.mark.fault("full disk")`. The table counts its
cases. Where a case makes several trials, the marker gives their number over all cases: `trials=14`.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGE = TESTS.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: begin -->\n", "<!-- faults: end -->\n"

FAULTS = {  # key of the marker: (what goes wrong, what happens here); in the order of the table
    "attention mask": (
        "1 The attention mask is None under SDPA, or the position embeddings are missing",
        "the masks are the same under eager attention, SDPA and FlexAttention",
    ),
    "no network": (
        "2 The script of a calibration set has vanished, or there is no network",
        "local files and `sample` open no connection; a data set that cannot be loaded is an error of one line",
    ),
    "position buffer": (
        "3 A buffer of nsamples x max_position_embeddings fills the memory",
        "at 131072 positions no tensor has that many elements",
    ),
    "short documents": (
        "4 No document is longer than seqlen, and the run hangs",
        "documents are joined; c4, whose documents are not, ends with an error",
    ),
    "nsamples": ("5 nsamples is fixed at 128 somewhere", "1, 7 and 300 work; fewer than 16 give a warning"),
    "grouped queries": (
        "6 Grouped-query attention breaks a shape",
        "counts are exact with 1, 2 and 4 key-value heads of 4; statistics equal retained gradients",
    ),
    "file size": ("7 The saved model is as large as before", "later: files are dense; there is no `--save packed` yet"),
    "2:4 speed": (
        "8 2:4 gives no speedup",
        "later: the speed of pruned models is not measured yet; the README says that dense kernels run them no faster",
    ),
    "protocol": (
        "9 Perplexity differs because the split, seqlen, windows or BOS differ",
        "the report has seqlen, windows, sha256 of the tokens and BOS; a table never mixes two protocols",
    ),
    "broken checkpoint": (
        '10 A broken checkpoint prunes "fine"',
        "dense perplexity is measured first: near guessing it gives a warning, not finite it is refused",
    ),
    "model classes": (
        "11 Only hard-coded model classes work",
        "counts are exact for 11 dense families, 8 with experts and 3 multimodal ones, besides Llama",
    ),
    "quantised": (
        "12 Quantised layers are pruned into nonsense",
        "they are refused by name before weights are read",
    ),
    "lm_head": (
        "13 lm_head or a tied embedding is pruned by default",
        "they are never touched; asking for them is an error, tied or not",
    ),
    "Cholesky": (
        "14 Cholesky fails, and the identity silently replaces the factor",
        "the damping grows up to 1000 times; the report names the matrix. If that fails, the run is refused by name",
    ),
    "reload": (
        "15 NaN after reloading, or keys are missing",
        "logits before saving have the bits of those after loading; missing keys are refused",
    ),
    "fused experts": (
        "16 Fused 3-D experts are skipped silently",
        "every expert is a target and over 95 % of the blocks are covered; what is skipped is listed with the reason",
    ),
    "unrouted expert": (
        "17 An expert that saw no token gives NaN or is wiped",
        "its weights are ranked by magnitude, the count is exact and the report names it",
    ),
    "pattern sparsity": ("18 0.75 with 2:4 silently gives 0.5", "the contradiction is refused"),
    "column tail": (
        "19 in_features is no multiple of 4",
        "an error; with `--nm-tail dense` the count is exact",
    ),
    "n:m meaning": (
        "20 n of m means kept in one tool and pruned in another",
        "n of m are kept everywhere; the adapters convert",
    ),
    "untruncated text": (
        "21 Untruncated text runs out of memory",
        "no call is longer than seqlen; a seqlen beyond the model or the text is refused first",
    ),
    "activations": (
        "22 All activations are joined before use",
        "in one pass the peak is the same for 8 and 64 windows; block by block it grows by the hidden states alone",
    ),
    "ranks": ("23 Masks differ between ranks", "later: one process; the whole model must fit on its device"),
    "denominators": (
        "24 Sparsity is reported over the wrong denominator",
        "the report has what was asked, the share of the pruned matrices and that of the model, counted in the weights",
    ),
    "wrong layers": (
        "25 A regular expression hits the wrong layers",
        "`--dry-run` lists every target and what is removed of it; a glob that matches nothing is an error",
    ),
    "long run dies": (
        "26 The run dies at block 60 of 80",
        "`--resume` goes on behind the last finished stage, with the same bits; finished stages do not run again",
    ),
    "ties": (
        "27 Weights are constant or tie, and the count is off",
        "the count is exact for every method, allocation and order, and for every dtype of the kernels",
    ),
    "padding": (
        "28 Padding counts in the statistics",
        "padded and unpadded batches give equal statistics; without the mask they differ",
    ),
    "other text": (
        "Pruning is good on text like the calibration's, and bad on other text",
        "each run compares losses on text of several domains; it warns where Wanda is better and says what helps. A "
        "search avoids allocations that harm a guard",
    ),
    "kill -9": (
        "`kill -9` at a random moment, one to three times in a run",
        "the weights and the report are the same and nothing is left behind; `python tests/kill.py 50` tries 50 runs",
    ),
    "Ctrl-C": (
        "Ctrl-C",
        "one line with a hint, exit code 130, no half output; `--resume` gives the same bits",
    ),
    "full disk": (
        "The disk is full",
        "one line, no half output, an old output stays; with room again `--resume` finishes. Four trials fill a real "
        "file system (skipped where a user may not mount one)",
    ),
    "read-only": ("The output folder is read-only", "one line before the model is loaded"),
    "vanishing file": (
        "Text, weights, output folder or state vanish during the run",
        "one line",
    ),
    "changed state": (
        "A file of the resume state was changed or is broken",
        "one line; no changed value, shape, dtype or fact is ever used",
    ),
    "memory while calibrating": (
        "Memory runs out while calibrating (the tests raise the error)",
        "fwanda halves the micro-batch, then checkpoints, says so each time and counts nothing twice; what never fits "
        "is an error of one line",
    ),
    "memory in blocks": (
        "Memory runs out block by block (the tests raise the error)",
        "fwanda halves the batches and says so; what never fits is an error of one line, and finished blocks stay for "
        "`--resume`",
    ),
    "fuzz": (
        "Files of any content",
        "each is read, or refused in one line, in under 1 GiB and 5 s. Trials are an upper bound; `FWANDA_FUZZ=10000` "
        "tries that many files of each kind",
    ),
    "not finite": (
        "NaN or inf in weights, activations or Hessians",
        "refused in one line that names the tensor and what is wrong with it",
    ),
    "repeatable": ("Two runs differ", "the bits are the same for every method and allocation"),
    "statistics file": (
        "Equal statistics give other masks",
        "statistics that went through a file give equal weights",
    ),
    "statistics on GPU": (
        "Equal statistics give other masks on a GPU",
        "weights are equal on CPU and GPU; these tests need a GPU, so CI skips them",
    ),
    "names in a page": (
        "A name in a file becomes markup, a formula or a script in a report",
        "every name in the HTML page and in the model card is shown as it is, with control characters made visible",
    ),
    "sweep pictures": (
        "A picture of a sweep leaves out a cell, or a spike flattens all others",
        "each cell is a point or a note; spikes are clipped with their value; axes have plain numbers",
    ),
    "page size": (
        "A report of a model with thousands of experts is too large to open",
        "the HTML page shows blocks and kinds of matrix: 16,000 matrices take under 300 kB",
    ),
}


class Collector:
    """A plugin of pytest that counts the cases of tests with the marker."""

    def __init__(self):
        self.trials: dict[str, dict[str, int]] = defaultdict(dict)  # key -> test -> trials

    def pytest_collection_finish(self, session):
        for item in session.items:
            test = f"{item.path.name}::{item.originalname}"
            for marker in item.iter_markers("fault"):
                (key,) = marker.args
                total = marker.kwargs.get("trials")
                self.trials[key][test] = total or self.trials[key].get(test, 0) + 1


def table(trials: dict[str, dict[str, int]]) -> str:
    """The table in Markdown, one row a fault.

    Raises:
        ValueError: a marker has a key that FAULTS lacks, or a fault has neither a test nor a reason to have none yet.
    """
    if unknown := sorted(trials.keys() - FAULTS.keys()):
        raise ValueError(f"these keys of the marker `fault` are not in FAULTS of {Path(__file__).name}: {unknown}")
    lines = ["| fault | number of trials | outcome | tests |", "|---|---|---|---|"]
    for key, (fault, outcome) in FAULTS.items():
        tests = trials.get(key, {})
        if bool(tests) == outcome.startswith("later: "):
            raise ValueError(
                f"the fault {key!r} needs a test with the marker `fault`, or an outcome that begins with later"
            )
        names = ", ".join(f"`{name}`" for name in tests) or "-"
        lines.append(f"| {fault} | {sum(tests.values())} | {outcome} | {names} |")
    return "\n".join(lines) + "\n"


def collected() -> dict[str, dict[str, int]]:
    """key -> test -> trials, from all tests beside this file.

    Raises:
        RuntimeError: a test file does not import.
    """
    collector, output = Collector(), io.StringIO()
    with contextlib.redirect_stdout(output):
        code = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", str(TESTS)], plugins=[collector])
    if code:
        raise RuntimeError(f"pytest cannot collect the tests:\n{output.getvalue()}")
    return collector.trials


def main(check: bool) -> int:
    """Write the table, or say whether the file has it."""
    page = PAGE.read_text()
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    new = head + BEGIN + table(collected()) + END + tail
    if check and new != page:
        print("docs/reliability.md is not what the markers say: run python tests/reliability.py", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
