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
        "local files and `sample` open no connection; the hub is asked once, and a data set that cannot be loaded is "
        "an error of one line that names the flag, before the model is loaded",
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
    "file size": (
        "7 The saved model is as large as before",
        "`--save packed` and `fwanda pack` store the pruned matrices in at most 57 % of their size at 50 % sparsity in "
        "bf16 and 37 % at 70 %, and every bit comes back",
    ),
    "packed file": (
        "A packed file is truncated, altered, of another version or of another model, or it is loaded without fwanda",
        "an error of one line names the tensor, and nothing is loaded; without fwanda, the error of transformers comes "
        "with a line that says what to import",
    ),
    "stored type": (
        "A file stores weights, biases, packed weights or masks as bools, complex numbers or integers",
        "one line names the tensor and its type; nothing is cast in silence",
    ),
    "frozen weights": (
        "A model that was packed is unpacked and fine-tuned, but its pruned matrices stay frozen",
        "`unpack_` and `load_model` of a packed folder give parameters that train as before, in their order of before",
    ),
    "own layers": (
        "A linear layer has hooks, buffers, attributes or a forward() of its own, which packing would lose",
        "`unpack_` gives the same layers back; `pack_` names a layer whose output would differ, or that has hooks or "
        "buffers, in one line before it packs any",
    ),
    "2:4 input": (
        "A model for torch's 2:4 kernels is not 2:4, has shapes or dtypes that do not fit, or there is no GPU for them",
        "`to_semi_structured` names the matrix in an error of one line, and changes nothing",
    ),
    "stopped conversion": (
        "`fwanda pack` or `fwanda unpack` is interrupted, or the disk is full",
        "no half output; of the converted model, one file of weights is in memory at a time",
    ),
    "packed experts": (
        "Packed experts come back under other names than the checkpoint has, or pruned experts cannot be packed",
        "`fwanda unpack` writes the names and the bits of `--save dense` for every family with experts, and where "
        "several layers are stored as one matrix; packing them again gives the same files, without a false warning",
    ),
    "record of other weights": (
        "A folder is packed or unpacked whose weights are not those of its `fwanda.json`, as after fine-tuning",
        "one line that names the first matrix and says what to do, and no half output",
    ),
    "kept zeros": (
        "Removed weights come back in fine-tuning, or in quantisation afterwards",
        "`keep_zeros` holds them through any optimizer of torch and through a merge of adapters; int8 of torchao keeps "
        "0.0",
    ),
    "2:4 speed": (
        "8 2:4 gives no speedup",
        "later: no test guards it; docs/packed.md has measured speeds, and the README says that dense kernels run "
        "pruned models no faster",
    ),
    "protocol": (
        "9 Perplexity differs because the split, seqlen, windows or BOS differ",
        "the report has seqlen, windows, sha256 of the tokens and BOS; a table never mixes two protocols",
    ),
    "broken checkpoint": (
        '10 A broken checkpoint prunes "fine"',
        "dense perplexity is measured first: near guessing it gives a warning, not finite it is refused",
    ),
    "no gradient": (
        "No gradient reaches a layer, because it only selects tokens or its output is changed in place",
        "a layer that only selects tokens keeps the same share of each row, and is named in a warning; outputs that "
        "are changed in place are measured",
    ),
    "model classes": (
        "11 Only hard-coded model classes work",
        "counts are exact for 11 dense families, 8 with experts and 3 multimodal ones, besides Llama",
    ),
    "odd config": (
        "config.json or tokenizer_config.json holds a value of another type, or an attention that the device lacks",
        "one line that names the value, before text is read",
    ),
    "broken generation config": (
        "generation_config.json is cut, empty, binary, a dangling link or a folder, or a config.json is nested deeply",
        "one line that names the file; a model without generation_config.json is accepted",
    ),
    "tokenizer without unknown token": (
        "A tokenizer meets a word and has no token for unknown ones",
        "one line that says to take the tokenizer of the original model",
    ),
    "quantised": (
        "12 Quantised layers are pruned into nonsense",
        "they are refused by name before weights are read",
    ),
    "unusual weights": (
        "Weights are no plain tensors: on the meta device, offloaded, sharded, wrapped, quantised or parametrised",
        "refused in one line that names the first such tensor or module and says what to do, before text is read",
    ),
    "several dtypes": (
        "The weights of a model have several dtypes",
        "a model that runs with them is pruned; others, and matrices of several dtypes, are refused in one line that "
        "names a weight of each, before text is read",
    ),
    "adapters": (
        "LoRA adapters are pruned as if they were weights of the model",
        "refused by name: merge them first; a merged model is pruned and saved",
    ),
    "one module twice": (
        "One module or tensor stands at two places of the model",
        "refused before pruning, unless the model's class ties the tensors, as it does with embeddings",
    ),
    "compiled": (
        "A part of the model is compiled, and hooks do not run",
        "found at any depth and refused before anything runs",
    ),
    "compiled before": (
        "A closure was compiled before its statistics are collected, and nothing is measured",
        "`unseen` names the modules; asking for their statistics is an error that says why there are none",
    ),
    "tuple outputs": (
        "The model returns tuples (return_dict=False)",
        "masks and weights are those of the same model with named outputs",
    ),
    "GGUF": (
        "A GGUF file is converted at each load, or its converted copy is broken, stale or half written",
        "it is converted once; the copy gives the bits that transformers reads from the file, is checked at each load "
        "and made anew if it is broken; writers at once share one copy",
    ),
    "no home": (
        "There is no home folder, or it cannot be written",
        "models load, with one warning where no converted copy can be kept; output can be overwritten",
    ),
    "typo": (
        "A mistyped folder or id makes the hub be asked again and again",
        "what looks like a path is refused at once; the hub is asked once, for at most a few seconds, and a model that "
        "was downloaded before loads without it",
    ),
    "busy": (
        "Other programs keep the CPUs busy, and the threads of a run wait for each other",
        "one warning and `fwanda doctor` say so, and that OMP_NUM_THREADS=1 helps",
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
    "unsavable settings": (
        "The run is lost in its last step: transformers refuses to save settings that it has loaded",
        "such settings are saved as they are; what cannot be saved is refused in one line before calibration",
    ),
    "generate() changed": (
        "The saved model generates otherwise than the original",
        "the generation config is written without changes, and generate() gives the same tokens",
    ),
    "left behind": (
        "Tensors, blocks, licences or templates of the checkpoint are missing from the output without a word",
        "licences, notices, templates and processor settings are copied; tensors and blocks that the model does not "
        "use give a warning, which the record keeps",
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
    "ranks": (
        "23 Masks differ between ranks",
        "one, two and three processes give the same masks and sums, bit for bit",
    ),
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
    "damage": (
        "The pruned model has collapsed, and nothing says so",
        "a warning names the worst text, how much worse it is and what to try: from four times the dense perplexity "
        "on, or near guessing; by the domains where there is no evaluation text, and for each cell of a sweep",
    ),
    "wrapped before saving": (
        "A module is wrapped, compiled or parametrised between `prune` and `save_pruned`: what is saved would not load",
        "refused in one line that names the module and the tensor, before anything is written",
    ),
    "existing zeros": (
        "Pruning a model that is already sparse gives removed weights back, or removes more than was asked",
        "zeros stay zeros and count as removed first, for every method; where they make more zeros than were asked "
        "for, the report says so",
    ),
    "other model": (
        "The model has changed (a norm, one weight, a value of its config) between `fwanda calibrate` and "
        "`fwanda prune --statistics`, before `--resume`, or between two runs of a sweep; or the tokenizer, before "
        "`--resume` or between two runs of a sweep",
        "a hash of all weights and of the settings that change outputs tells it: statistics and a resumed run are "
        "refused in one line, and a sweep runs its cells anew",
    ),
    "file of the user": (
        "`--output` or `--html` names a folder or a file in which the user's own files lie, or `--overwrite` a folder "
        "with the file of `--config`",
        "refused in one line before the model is loaded; only `--overwrite` replaces what fwanda has not written",
    ),
    "unused statistics": (
        "Given statistics change the order of the run, or are not used",
        "they replace only what is not measured again; where nothing reads them, one line before the model is loaded",
    ),
    "odd calls": (
        "The Python functions are called with other types, or in other modes of torch and of the model",
        "one line that names the argument; modes and states change no bit and are there again afterwards",
    ),
    "array for a flag": (
        "An array or a tensor is given where a function expects True or False, a word, a number or a path",
        "one line that names the argument; no truth value of an array is asked for",
    ),
    "warnings": (
        "Warnings ignore the filters of the caller and point into the package",
        "they obey the filters and point at the line that calls the package; the report has all of them",
    ),
    "threads": (
        "Two runs in two threads mix their warnings",
        "each report has its own",
    ),
    "kill -9": (
        "`kill -9` at a random moment, one to three times in a run",
        "the weights and the report are the same and nothing is left behind; `python tests/kill.py 50` tries 50 runs",
    ),
    "rank fails": (
        "One of several ranks is killed, or its memory or disk is full (the tests raise the last two)",
        "one line that names the rank, all ranks end within 30 s, no half output; `--resume`, on another "
        "number of ranks too, gives the same bits",
    ),
    "ranks differ": (
        "The ranks of a run have other weights or settings",
        "one line that names the rank and what differs",
    ),
    "ranks resume": (
        "One process resumes what several ranks began, or the other way round",
        "refused in one line: their sums add up in another order",
    ),
    "ranks by hand": (
        "RANK and WORLD_SIZE, or MASTER_ADDR and MASTER_PORT, are set by hand to what cannot be",
        "refused at once, in one line that names both",
    ),
    "Ctrl-C": (
        "Ctrl-C at any moment: in imports, in destructors, in the locks of libraries, while Python exits",
        "one line with a hint, exit code 130, no half output; `--resume` gives the same bits; more signals within two "
        "seconds change nothing",
    ),
    "closed terminal": (
        "The terminal is closed during a run (SIGHUP)",
        "no half output, as after Ctrl-C; under `nohup` the run goes on",
    ),
    "full disk": (
        "The disk is full, or a file would be larger than the limit of the process",
        "one line, no half output, an old output stays; with room again `--resume` finishes. Four trials fill a real "
        "file system (skipped where a user may not mount one)",
    ),
    "read-only": ("The output folder is read-only", "one line before the model is loaded"),
    "vanishing file": (
        "Text, weights, output folder or state vanish during the run",
        "one line",
    ),
    "written weights": (
        "Another program writes into the weight files while a run reads them",
        "one line that names the file, and no output; a file that is replaced by another does no harm. One that is cut "
        "short in place ends the process by SIGBUS",
    ),
    "changed state": (
        "A file of the resume state was changed or is broken",
        "one line; no changed value, shape, dtype or fact is ever used",
    ),
    "changed output": (
        "A finished output was changed, or files of it are gone or broken",
        "`--resume` names the difference in one line, or says what it has compared",
    ),
    "state thrown away": (
        "An interrupted run is repeated without `--resume`, and its finished work is gone",
        "refused in one line that names the work and both flags, `--resume` and `--overwrite`",
    ),
    "broken output": (
        "Standard output is a closed pipe, closed, full, or cannot write a character",
        "no traceback, and what was saved stays complete; exit code 141 after a closed pipe",
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
    "name of a text": (
        "A name is of no text: a share behind a guard, a list with commas, the text itself",
        "one line that names the flag and says what to write, before the model is loaded",
    ),
    "value of Python": (
        "Path, numbers of numpy, Fraction, Decimal, tuples: what Python has and a file of settings has not",
        "they mean what they say, exactly, and become plain values; others are refused in one line",
    ),
    "unused setting": (
        "A setting is ignored in silence: nsamples beside token ids, a start token that nothing uses, the device or "
        "the dtype of a model that is loaded already",
        "a warning names the setting and what is used in its place",
    ),
    "null row": (
        "One row of a text is null or has no text, and the file is refused, or read under another rule than a data set",
        "the row is left out and counted in a warning, in files and data sets alike; where no row has text, the error "
        "names the fields that were found",
    ),
    "conversation": (
        "Rows are conversations, without plain text",
        "the tokenizer's chat template turns them into text; what it cannot turn is named by line and message",
    ),
    "pipe": (
        "A file to be read is a pipe or a device, which may never end",
        "refused at once, in one line",
    ),
    "yaml": (
        "YAML reads settings otherwise than meant: `on` is true, and a key that is given twice counts once",
        "refused in one line that says what to write",
    ),
    "packed bomb": (
        "A packed file of a few kilobytes fills the memory",
        "gzip and parquet files that hold far more than text of their size are refused before they are read",
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
    "default dtype": (
        "The process has another default dtype or device (bf16, fp16, fp64, meta)",
        "kernels, statistics, every method, loading and the adapters give the same bits",
    ),
    "in-place change": (
        "A kernel changes a tensor behind autograd's back, and gradients are silently wrong",
        "versions are bumped; leaves that require grad, their views and inference tensors are refused, as in torch; "
        "on every backend, compiled and with fake tensors",
    ),
    "transforms": (
        "An op runs under a transform of torch.func: grad, jacrev, vmap",
        "served, or refused in one line that names the op",
    ),
    "counts": (
        "A count is no integer: 9.999999 keeps 9",
        "integers of Python and numpy are read; all else is an error of one line with the op and the argument",
    ),
    "copied hook": (
        "A module is copied, pickled or called by threads while its statistics are collected",
        "copies carry no hook and do not count; nested collectors and threads count exactly; replicas are refused",
    ),
    "odd module": (
        "A hooked module returns a tuple, or gets its input by an unexpected keyword",
        "measured; what has no input or output of floats is an error of one line that names the module",
    ),
    "stale buffer": (
        "An input, a token mask or what a collector handed out is changed in memory between two passes",
        "each pass counts with the values of its time; what was handed out stays as it was",
    ),
    "shared once": (
        "Modules share their input in one pass and not in another",
        "statistics count each input where it belongs; `collect_hessians` ends with an error that names the modules",
    ),
    "no CUDA kernels": (
        "CUDA kernels cannot be compiled or loaded: no NVRTC, an old driver, an unknown card",
        "Triton serves; `python -m fwanda_kernels` says why in one line",
    ),
    "broken cubin": ("A file of the kernel cache is cut, changed or foreign", "it is compiled anew"),
    "no cubin cache": ("The kernel cache cannot be written, or the disk is full", "kernels are compiled and not kept"),
    "cubin race": ("Several processes compile the same kernels at once", "all get the same code, and one file stays"),
    "wrong CUDA context": (
        "A thread calls an op before it used the GPU, or while it uses another one",
        "the kernel runs on the device of the tensor, and the thread's context stays as it was",
    ),
    "not a tensor": (
        "An op gets a list, an array, a sparse tensor, a DTensor, a tensor on the meta device, or sums of another size",
        "one line that names the op and the argument; nothing is changed",
    ),
    "huge number": (
        "A number has a billion digits, or more than 64 bits",
        "refused at once, in one line",
    ),
    "endless work": (
        "A number or a recipe of a few bytes asks for work of years",
        "refused at once, in one line that names the limit",
    ),
    "zero sizes": ("A matrix or batch has a dimension of size 0", "every op serves it, on every backend"),
    "overlap": (
        "Weights overlap in memory (expanded, as_strided, twice in a list), and counts are off; or a call changes the "
        "memory that another argument of it reads",
        "refused in one line before anything is changed; any strides without overlap are served",
    ),
    "negated view": (
        "A tensor holds the negatives of its values, as z.conj().imag does",
        "it is read as its values; an op that would change it refuses it in one line",
    ),
    "autocast": (
        "torch.autocast is on: ops round their sums, and packed layers fail",
        "every op gives the same bits with and without it; a packed layer returns the dtype of a dense one",
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
