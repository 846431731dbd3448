"""The model card: `README.md` of a pruned model."""

from .record import FILE_NAME, Report


def model_card(report: Report, *, multimodal: bool = False) -> str:
    """A model card in Markdown, with metadata for the Hugging Face Hub.

    It says what was done to the model, how to load it and what to expect of it.

    Args:
        report: the record of the run.
        multimodal: the model also reads images, so another class loads it.
    """
    config, sparsity = report.config, report.sparsity
    facts = [f"- {key}: {config[key]}" for key in ("model", "method", "allocation", "pattern") if config.get(key)]
    facts.append(f"- sparsity: {sparsity['matrices']:.4f} of the pruned matrices, {sparsity['model']:.4f} of the model")
    line = "- perplexity on {source}: {dense:.2f} dense, {pruned:.2f} pruned ({windows} windows of {seqlen} tokens)"
    facts += [line.format_map(text) for text in report.perplexity]
    facts += [_domain(domain) for domain in report.domains if domain["dense"] is not None]
    return _CARD.format(facts="\n".join(facts), file=FILE_NAME, **(_IMAGE_TEXT if multimodal else _TEXT))


def _domain(domain: dict) -> str:
    """What pruning costs on the text of one domain."""
    pruned = "not finite" if domain["pruned"] is None else f"{domain['pruned']:.3f}"
    read = "calibrated" if domain["calibrated"] else "not calibrated"
    losses = f"{domain['dense']:.3f} dense, {pruned} pruned"
    return f"- mean loss on {domain['source']}, in nats: {losses} ({read} on that text)"


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

Removed weights are stored as zeros. The files are as large as before, and ordinary dense kernels run no faster.
Pruning changes the answers of the model: measure it on your task. The licence and the limits of the original model
still apply. `{file}` holds the full record of the run.
"""
