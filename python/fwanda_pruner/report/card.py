"""The model card: `README.md` of a pruned model, with the metadata that the Hugging Face Hub reads."""

from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache

from ..errors import shortened
from ..methods_table import METHODS
from .page import Run, measured_on, method_title, perplexity, runs_of
from .record import FILE_NAME, Report

_DATASETS = {"c4": "allenai/c4", "wikitext2": "Salesforce/wikitext"}  # names of texts -> data sets of the Hub
_KNOWN = {"smollm2": {"base_model": "HuggingFaceTB/SmolLM2-135M-Instruct", "license": "apache-2.0", "language": "en"}}
_DEQUANTISED = (
    "The weights were read from a GGUF file. If it is quantised, they are not exactly those of the original model."
)
_INHERITED = ("license", "license_name", "license_link", "language")
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)", re.ASCII)  # folder of a model in the cache of the Hub
_CLASSES = {"text-generation": "AutoModelForCausalLM", "image-text-to-text": "AutoModelForImageTextToText"}


def model_card(report: Report, *, multimodal: bool = False, note: str | None = None) -> str:
    """A model card in Markdown, with metadata for the Hugging Face Hub.

    It says what was done to the model, how to load it and what to expect of it. The base model, its licence and its
    language come from the card of the source, where that is a folder or in the cache of the Hub. Paths on this machine
    are cut to their last part.

    Args:
        report: the record of the run.
        multimodal: the model also reads images, so another class loads it.
        note: a sentence about what else was done to the model.
    """
    (run,) = runs_of({"": report})
    task = "image-text-to-text" if multimodal else "text-generation"
    name, auto_class = _public(run.model), _CLASSES[task]
    packed = report.config.get("save") == "packed"
    parts = [
        f"---\n{_metadata(run, task).to_yaml()}\n---",
        f"# {_escaped(name)}, pruned by {_escaped(method_title(report.config.get('method')) or 'fwanda')}",
        _escaped(run.sentence_of(name, _public)),
        *([_DEQUANTISED] if _is_gguf(run.model) else []),
        *([_escaped(note)] if note else []),
        f"## What was done\n\n{_table(('', ''), _facts(run))}",
        *_quality(report),
        f"## Load it\n\n{(_LOAD_PACKED if packed else _LOAD).format(auto_class=auto_class)}",
        f"## Limits\n\n{_PACKED if packed else _DENSE} {_LIMITS.format(file=FILE_NAME)}",
    ]
    return "\n\n".join(parts) + "\n"


def _is_gguf(name: str) -> bool:
    return name == "smollm2" or name.lower().endswith(".gguf")


def _metadata(run: Run, task: str) -> ModelCardData:
    config = run.report.config
    source = _source_facts(run.model)
    names = [source.name for source in run.report.sources]
    method = config.get("method")
    return ModelCardData(
        **source,
        library_name="transformers",
        pipeline_tag=task,
        tags=["pruned", "sparse", "fwanda", *([method] if method in METHODS and method != "fwanda" else [])],
        datasets=sorted({_DATASETS.get(name, name) for name in names if name in _DATASETS or _is_hub_id(name)}) or None,
        model_name=f"{_public(run.model)} pruned",
        eval_results=[
            EvalResult(
                task_type=task,
                dataset_type=_DATASETS.get(text["source"], _public(text["source"])),
                dataset_name=_public(text["source"]),
                metric_type="perplexity",
                metric_value=round(text["pruned"], 4),
                metric_name=f"perplexity, {text['windows']} windows of {text['seqlen']} tokens",
            )
            for text in run.report.perplexity
            if math.isfinite(text["pruned"])
        ]
        or None,
    )


def _source_facts(model: str) -> dict:
    """base_model, and what else the card of the source says that holds for the pruned model too."""
    if model in _KNOWN and not Path(model).exists():
        return _KNOWN[model]
    folder, hub_id = _source(model)
    found = {}
    if folder is not None:
        with contextlib.suppress(Exception):  # a card that cannot be read says nothing
            found = ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data.to_dict()
        with contextlib.suppress(OSError, ValueError):
            settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            found.setdefault("license", settings["license"] if isinstance(settings.get("license"), str) else None)
    base = hub_id or found.get("base_model")
    facts = {key: found.get(key) for key in _INHERITED} | {"base_model": base}
    return {key: value for key, value in facts.items() if value and _is_text(value)}


def _source(model: str) -> tuple[Path | None, str | None]:
    """The folder with the card of a model, and its name on the Hub; None where they are not known."""
    path = Path(model)
    with contextlib.suppress(OSError, ValueError):
        if path.is_dir():
            match = _SNAPSHOT.search(str(path.resolve()))
            return path, f"{match[1]}/{match[2]}" if match else None
        if path.exists() or not _is_hub_id(model):
            return None, None
        file = try_to_load_from_cache(model, "config.json")
        return (Path(file).parent if isinstance(file, str) else None), model
    return None, None


def _facts(run: Run) -> list[tuple[str, str]]:
    """What was done, as rows of a table."""
    config, sparsity = run.report.config, run.report.sparsity
    calibration = ", ".join(_public(source.name) for source in run.report.sources)
    windows = (
        f" ({config['nsamples']} windows of {config['seqlen']} tokens)" if {"nsamples", "seqlen"} <= {*config} else ""
    )
    rows = {
        "base model": _public(run.model),
        "method": method_title(config.get("method")),
        "allocation": config.get("allocation"),
        "chosen by the search": run.search.chosen if run.search else None,
        "pattern": config.get("pattern"),
        "zeros in the pruned matrices": f"{sparsity['matrices']:.4f}",
        "zeros in the whole model": f"{sparsity['model']:.4f}",
        "calibration": f"{calibration}{windows}" if run.report.tokens_sha256 and calibration else None,
        "seed": config.get("seed"),
        "fwanda-kernels": run.report.versions.get("fwanda_kernels"),
    }
    return [(name, str(value)) for name, value in rows.items() if value is not None]


def _quality(report: Report) -> list[str]:
    """Tables of perplexity and of the loss on several domains, where they were measured."""
    parts = []
    if report.perplexity:
        rows = [
            (_public(text["source"]), *(perplexity(text[key]) for key in ("dense", "pruned")), measured_on(text))
            for text in report.perplexity
        ]
        parts.append(f"## Perplexity\n\n{_table(('text', 'dense', 'pruned', 'measured on'), rows)}")
    domains = [domain for domain in report.domains if domain["dense"] is not None]
    if domains:
        rows = [
            (
                _public(domain["source"]),
                *(_loss(domain[key]) for key in ("dense", "pruned")),
                "yes" if domain["calibrated"] else "no",
            )
            for domain in domains
        ]
        head = ("text", "dense", "pruned", "calibrated on that text")
        parts.append(f"## Mean loss by domain, in nats a token\n\n{_table(head, rows)}")
    return parts


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.3f}"


def _public(name: str) -> str:
    """A name without the folders of this machine: only ids of the Hub keep their slash."""
    return shortened(name if _is_hub_id(name) and not Path(name).exists() else Path(name).name or name)


def _is_hub_id(name: str) -> bool:
    return (
        _HUB_ID.fullmatch(name) is not None and not name.startswith((".", "-")) and not Path(name).suffix[1:].isalpha()
    )


def _is_text(value) -> bool:
    """Whether a field of a card is a text or a list of texts."""
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _escaped(text: str) -> str:
    """Text on one line that Markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]<>|#$])", r"\\\1", shortened(text, 2000))


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(map(_escaped, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_LOAD = """\
```python
from transformers import AutoTokenizer, {auto_class}

model = {auto_class}.from_pretrained("path/to/this/folder", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```"""
_LOAD_PACKED = """\
Install fwanda-kernels first, with its extra `prune`. Loading ends with mismatched sizes without `import fwanda_pruner`.

```python
import fwanda_pruner
from transformers import AutoTokenizer, {auto_class}

model = {auto_class}.from_pretrained("path/to/this/folder", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```"""
_DENSE = """\
Removed weights are stored as zeros. The files are as large as before, and ordinary dense kernels run no faster."""
_PACKED = """\
Removed weights are not stored: the files hold one bit per weight and the kept values, in a layout that only
fwanda-kernels reads. `fwanda unpack` writes the model as an ordinary folder."""
_LIMITS = """\
Pruning changes the answers of the model: measure it on your task. The licence and the limits of the original model
still apply. `{file}` holds the full record of the run."""
