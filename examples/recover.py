"""Fine-tune a pruned model for a few steps on its calibration text, and hold its zeros. A CPU is enough.

    python examples/recover.py [MODEL [OUTPUT]]

MODEL is smollm2 if left out, which is pruned first; OUTPUT is pruned-recovered.
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
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
losses = []
with fwanda_pruner.keep_zeros(model):
    for step in range(8):
        batch = windows[2 * step % (len(windows) - 1) :][:2]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
fwanda_pruner.save_pruned(model, tokenizer, report, output)
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
