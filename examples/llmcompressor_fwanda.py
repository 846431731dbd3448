"""Prune half of a model's weights by F-Wanda's global allocation through llm-compressor, from a YAML recipe.

    python examples/llmcompressor_fwanda.py MODEL OUTPUT

llm-compressor needs its own versions of other packages: run pip install ".[prune,llmcompressor]" in a new
environment. MODEL is a Hugging Face folder or id; OUTPUT is the folder to write.
"""

import sys

try:
    from llmcompressor import oneshot
except ModuleNotFoundError as error:
    sys.exit(f'{error}: run pip install ".[prune,llmcompressor]" in the clone, in a new environment')
from datasets import Dataset

import fwanda_pruner.integrations.llmcompressor  # noqa: F401  makes FWandaModifier a key of recipes
from fwanda_pruner.text.sources import load_documents

RECIPE = """
pruning_stage:
  pruning_modifiers:
    FWandaModifier: {sparsity: 0.5, allocation: global}
"""
if len(sys.argv) != 3:
    sys.exit("usage: python examples/llmcompressor_fwanda.py MODEL OUTPUT")
model, output = sys.argv[1:]
text = Dataset.from_dict({"text": load_documents("sample", purpose="calibration")})
model = oneshot(
    model=model, recipe=RECIPE, dataset=text, num_calibration_samples=32, max_seq_length=512, output_dir=output
)
matrices = [p for p in model.get_decoder().layers.parameters() if p.dim() == 2]
print(f"{sum(int((p == 0).sum()) for p in matrices) / sum(p.numel() for p in matrices):.1%} zeros in the blocks")
