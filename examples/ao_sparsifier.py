"""Prune a small network by Wanda through torch.ao.pruning.

The first layer keeps 2 of every 4 weights (2:4); the second keeps half of the weights of each row.
"""

import torch
from torch import nn

from fwanda_pruner.integrations.ao_sparsifier import WandaSparsifier

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
sparsifier = WandaSparsifier(sparsity_level=0.5)
config = [{"tensor_fqn": "0.weight", "semi_structured_block_size": 4}, {"tensor_fqn": "2.weight"}]
sparsifier.prepare(model, config)
with torch.no_grad():
    model(torch.randn(256, 32))  # calibration: the sparsifier measures the inputs of both layers
sparsifier.step()
sparsifier.squash_mask()
for layer in (model[0], model[2]):
    print(f"{layer}: {(layer.weight == 0).float().mean():.0%} zeros")
