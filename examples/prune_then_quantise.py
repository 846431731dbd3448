"""Prune half of a model's weights by Wanda, then store its linear layers as int8 by torchao. Removed weights stay zero.

    python examples/prune_then_quantise.py [MODEL [OUTPUT]]

It needs torchao and accelerate: run pip install torchao accelerate. A CPU is enough. MODEL is smollm2 if left out;
OUTPUT, the folder of the int8 model, is pruned-int8.
"""

import sys
import tempfile

import torch

try:
    from torchao.quantization import Int8WeightOnlyConfig
except ModuleNotFoundError as error:
    sys.exit(f"{error}: run pip install torchao accelerate")
from transformers import AutoModelForCausalLM, TorchAoConfig

import fwanda_pruner


def zeros(model) -> dict[str, torch.Tensor]:
    """Where the matrices of the decoder blocks are zero, by name."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    weights = {name: layer.weight for name, layer in layers.items() if "layers." in name}
    return {name: (w.dequantize() if hasattr(w, "dequantize") else w) == 0 for name, w in weights.items()}


name, output = [*sys.argv[1:], *["smollm2", "pruned-int8"][len(sys.argv) - 1 :]]
model, tokenizer = fwanda_pruner.load_model(name, device="cpu", dtype="bfloat16")
report = fwanda_pruner.prune(model, tokenizer, method="wanda", sparsity=0.5, nsamples=16, seqlen=256, guard="none")
removed = zeros(model)
with tempfile.TemporaryDirectory() as folder:
    fwanda_pruner.save_pruned(model, tokenizer, report, f"{folder}/pruned")
    int8 = TorchAoConfig(Int8WeightOnlyConfig())  # symmetric: the integer 0 means 0.0
    quantised = AutoModelForCausalLM.from_pretrained(f"{folder}/pruned", quantization_config=int8, device_map="cpu")
quantised.save_pretrained(output)
tokenizer.save_pretrained(output)

loaded = zeros(AutoModelForCausalLM.from_pretrained(output, device_map="cpu"))
share = sum(int(mask.sum()) for mask in loaded.values()) / sum(mask.numel() for mask in loaded.values())
lost = sum(int((removed[name] & ~loaded[name]).sum()) for name in removed)
print(f"{share:.1%} zeros in the int8 model; {lost} removed weights came back")
