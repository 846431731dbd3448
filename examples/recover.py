"""Prune a model, and fine-tune it for eight steps while its removed weights stay zero. A CPU is enough.

    python examples/recover.py [MODEL [OUTPUT]]

MODEL is smollm2 if left out; OUTPUT, the folder of the result, is pruned-recovered.
"""

import sys

import torch

import fwanda_pruner
from fwanda_pruner.text.sources import load_documents

name, output = [*sys.argv[1:], *["smollm2", "pruned-recovered"][len(sys.argv) - 1 :]]
model, tokenizer = fwanda_pruner.load_model(name, dtype="float32")
report = fwanda_pruner.prune(model, tokenizer, method="wanda", sparsity=0.6, nsamples=16, seqlen=256, guard="none")


def windows_of(purpose: str) -> torch.Tensor:
    """[S, 256] windows of a part of `sample`: "calibration", which Wanda read, or "eval", which it did not."""
    text = "\n".join(load_documents("sample", purpose=purpose))
    ids = torch.tensor(tokenizer(text)["input_ids"], device=model.device)
    return ids[: len(ids) // 256 * 256].view(-1, 256)


held_out, windows = windows_of("eval")[:4], windows_of("calibration")
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)


def loss_on(batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss


with torch.no_grad():
    before = float(loss_on(held_out))
with fwanda_pruner.keep_zeros(model):
    for step, batch in enumerate(windows[:32].split(4), 1):
        loss = loss_on(batch)
        print(f"step {step} of 8: loss {float(loss):.4f}", flush=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
with torch.no_grad():
    after = float(loss_on(held_out))
done = f"loss on held-out text {before:.4f} -> {after:.4f}"
note = (
    f"After pruning, the model was fine-tuned for eight steps: {done}. The losses in the record are from before that."
)
fwanda_pruner.save_pruned(model, tokenizer, report, output, note=note)
print(f"{done}; saved {output}")
