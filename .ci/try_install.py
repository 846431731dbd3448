"""Try the installed packages: `python try_install.py kernels|prune [native]`, in an environment that has nothing else.

kernels: torch alone, so neither numpy nor transformers nor triton may be needed. prune: the extra [prune]; a tiny model
of a folder is pruned by the command line and loaded again. native: the compiled library for CPUs must serve.
"""

import importlib.util
import subprocess
import sys
import time
from pathlib import Path


def try_kernels(native: bool) -> None:
    import torch

    start = time.perf_counter()
    import fwanda_kernels

    seconds = time.perf_counter() - start
    assert not torch.cuda.is_initialized()
    assert seconds < 0.3, f"import fwanda_kernels took {seconds:.2f} s beyond torch"
    weight, scale = torch.randn(4, 8), torch.ones(8)
    mask = fwanda_kernels.row_topk_mask(weight, scale, 3)
    assert mask.sum(1).tolist() == [3] * 4
    with fwanda_kernels.use_backend("reference"):
        assert torch.equal(mask, fwanda_kernels.row_topk_mask(weight, scale, 3))
    status = fwanda_kernels.explain("row_topk_mask")["cpu"]["native"]
    assert (status == "serves") == native, status
    print(f"fwanda_kernels {fwanda_kernels.__version__}: torch {torch.__version__}, Python {sys.version.split()[0]}")


def try_pruner() -> None:
    from safetensors.torch import load_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "a": 2, "is": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).save_pretrained("model")
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained("model")
    fwanda = Path(sys.executable).parent / "fwanda"
    command = "prune model --sparsity 0.5 --nsamples 16 --seqlen 16 --eval sample --eval-windows 2 --eval-seqlen 16"
    subprocess.run([fwanda, *command.split(), "--output", "pruned"], check=True)
    subprocess.run([fwanda, "report", "pruned"], check=True)
    subprocess.run([fwanda, "doctor"], check=True, stdout=subprocess.DEVNULL)
    weights = [w for name, w in load_file("pruned/model.safetensors").items() if "proj" in name]
    assert sum(int((w == 0).sum()) for w in weights) * 2 == sum(w.numel() for w in weights)


what, *flags = sys.argv[1:]
absent = {"kernels": ("numpy", "transformers"), "prune": ("datasets", "gguf", "accelerate", "lm_eval", "matplotlib")}
present = [name for name in absent[what] if importlib.util.find_spec(name)]
assert not present, f"should not be installed: {present}"
try_kernels("native" in flags)
if what == "prune":
    try_pruner()
