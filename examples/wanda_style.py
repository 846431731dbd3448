"""Use the kernels in a fork of the Wanda reference code.

This is the loop of such a fork over the layers of one block. Only its wrapper and its selection are replaced.
"""

import torch
from torch import nn

from fwanda_pruner.integrations.wanda_style import WrappedGPT, wanda_mask

torch.manual_seed(0)
block = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
wrapped = {name: WrappedGPT(layer) for name, layer in block.named_children() if isinstance(layer, nn.Linear)}
hooks = [
    w.layer.register_forward_hook(lambda _, inp, out, w=w: w.add_batch(inp[0].data, out.data)) for w in wrapped.values()
]
block(torch.randn(8, 16, 32))
for hook, w in zip(hooks, wrapped.values(), strict=True):
    hook.remove()
    w.layer.weight.data[wanda_mask(w.layer.weight.data, w.scaler_row, sparsity_ratio=0.5)] = 0
    print(f"{w.layer}: {(w.layer.weight == 0).float().mean():.0%} zeros")
