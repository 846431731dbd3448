"""Prune a model, and fine-tune it for eight steps while its removed weights stay zero. A CPU is enough.

    python examples/recover.py [MODEL [OUTPUT]]

MODEL is smollm2 if left out; OUTPUT, the folder of the result, is pruned-recovered.
"""

import sys

import torch

import fwanda_pruner
from fwanda_pruner.text.sources import load_documents

name, output = [*sys.argv[1:], *["smollm2", "pruned-recovered"][len(sys.argv) - 1 :]]
model, tokenizer = fwanda_pruner.load_model(name, device="cpu", dtype="float32")
report = fwanda_pruner.prune(model, tokenizer, method="wanda", sparsity=0.6, nsamples=16, seqlen=256, guard="none")
ids = torch.tensor(tokenizer("\n".join(load_documents("sample", purpose="calibration")))["input_ids"])
windows = ids[: len(ids) // 256 * 256].view(-1, 256)
held_out, windows = windows[:4], windows[4:]
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)


def loss_on(batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss


with torch.no_grad():
    before = loss_on(held_out)
with fwanda_pruner.keep_zeros(model):
    for batch in windows[:32].split(4):
        loss_on(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
fwanda_pruner.save_pruned(model, tokenizer, report, output)
with torch.no_grad():
    print(f"loss on held-out text {before:.4f} -> {loss_on(held_out):.4f}")
