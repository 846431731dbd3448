"""Prune half of a small network by F-Wanda through torch.nn.utils.prune, with one threshold over all layers."""

import torch
from torch import nn
from torch.nn.utils import prune

import fwanda_kernels as fk
from fwanda_pruner.integrations.nn_prune import global_fwanda_unstructured

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
layers = {(module, "weight"): module for module in (model[0], model[2])}
with fk.collect_statistics(layers) as statistics:
    # the Fisher information needs the sum of the losses, not their mean
    loss = nn.functional.cross_entropy(model(torch.randn(256, 32)), torch.randint(8, (256,)), reduction="sum")
    loss.backward()
global_fwanda_unstructured(layers, statistics, amount=0.5)
for module, name in layers:
    prune.remove(module, name)
    print(f"{module}: {(module.weight == 0).float().mean():.0%} zeros")
