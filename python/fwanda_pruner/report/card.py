"""The README.md of a pruned model."""

from ..model.targets import is_multimodal
from .record import FILE_NAME, Report


def model_card(model, report: Report) -> str:
    """What was done, how to load it, and what to expect of it, in Markdown with the metadata of the Hub."""
    kind = _IMAGE_TEXT if is_multimodal(model) else _TEXT
    config, share = report.config, report.sparsity
    facts = [f"- {key}: {config[key]}" for key in ("model", "method", "allocation", "pattern") if config.get(key)]
    facts.append(f"- sparsity: {share['matrices']:.4f} of the pruned matrices, {share['model']:.4f} of the model")
    if report.perplexity is not None:
        facts.append(
            "- perplexity: {dense:.2f} dense, {pruned:.2f} pruned ({windows} windows of {seqlen} tokens)".format_map(
                report.perplexity
            )
        )
    return _CARD.format(facts="\n".join(facts), file=FILE_NAME, **kind)


_TEXT = {"task": "text-generation", "auto_class": "AutoModelForCausalLM"}
_IMAGE_TEXT = {"task": "image-text-to-text", "auto_class": "AutoModelForImageTextToText"}
_CARD = """\
---
library_name: transformers
pipeline_tag: {task}
tags: [pruned, sparse]
---
# Pruned with fwanda

{facts}

```python
from transformers import AutoTokenizer, {auto_class}

model = {auto_class}.from_pretrained("path/to/this/folder", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

Removed weights are stored as zeros: the files are as large as before, and ordinary dense kernels run no faster.
Pruning changes what the model says; measure it on your task. The original model's licence and limits still apply.
The full record of the run is in `{file}`.
"""
