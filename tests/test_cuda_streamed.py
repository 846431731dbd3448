"""The streamed engine on a GPU: the bits of the resident one, whatever its copies run beside."""

import gc

import pytest
import tiny
import torch

import fwanda_pruner
from fwanda_pruner.engine import memory
from fwanda_pruner.engine.block_inputs import RamCopies
from fwanda_pruner.model.placement import blocks_lie_apart
from fwanda_pruner.model.targets import find_blocks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BLOCKS, TOKENS = 6, tiny.tokens(8, 256)
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}
SETTINGS = {"calibration": TOKENS, "deterministic": True, "micro_batch": "2", "compile": "off", "progress": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.llama(blocks=BLOCKS, dtype=torch.bfloat16, **SIZES).save_pretrained(folder)
    return folder


def load(folder, engine: str, **options):
    return fwanda_pruner.load_model(folder, device="cuda", engine=engine, **options).model


@pytest.mark.parametrize("size", [1 << 10, 1 << 24])
def test_copies_to_ram_and_back(size):
    device = torch.device("cuda")
    copies, kept, expected = RamCopies(device), [], []
    for number in range(24):  # the memory of a tensor is used again as soon as torch allows it
        tensor = torch.randn(size, device=device, generator=torch.Generator(device).manual_seed(number)).sin().cos()
        expected.append(tensor.sum(dtype=torch.float64))
        kept.append(copies.away(tensor))
        del tensor
    for value in reversed(expected):
        loaded = copies.back(kept.pop())
        assert torch.equal(loaded.sum(dtype=torch.float64), value)
        loaded.fill_(float("nan"))


def test_pinned_memory_takes_the_size_of_the_tensor_and_can_be_had_again():
    for _ in range(3):
        tensor = torch.arange(3 << 20, dtype=torch.int32).view(3, -1)
        copy = memory.pinned(tensor)
        assert copy.is_pinned() and torch.equal(copy, tensor) and memory.pinned(copy) is copy
        assert torch.equal(memory.pinned(tensor.cuda()), tensor)
        assert torch.equal(copy.to("cuda", non_blocking=True).cpu(), tensor)
        del copy
        gc.collect()


@pytest.mark.parametrize("ram", ["free", "full"])
@pytest.mark.parametrize("segment", [1, 2, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "fwanda", "allocation": "row"},
        {"method": "fwanda", "allocation": "global"},
        {"method": "fsparsegpt"},
        {"method": "wanda", "order": "sequential"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_masks(folder, settings, segment, ram, monkeypatch):
    """With a full RAM, blocks come from the mapped file and their inputs stay on the GPU."""
    if ram == "full":
        monkeypatch.setattr(memory, "free_ram", lambda: 0)
    dense, model = load(folder, "resident"), load(folder, "streamed")
    fwanda_pruner.prune(dense, **settings, **SETTINGS)
    report = fwanda_pruner.prune(model, engine="streamed", segment=segment, **settings, **SETTINGS)
    assert (report.engine, report.segment) == ("streamed", segment)
    for (name, parameter), expected in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(parameter.cuda(), expected), name
    blocks = list(find_blocks(model)[1].parameters())
    assert {p.device.type for p in blocks} == {"cpu"}
    assert all(p.is_pinned() for p in blocks) == (ram == "free")


def test_peak_memory(folder, monkeypatch):
    """Inputs of blocks go to RAM if it has room. The first run is not measured: cuBLAS keeps memory from then on."""
    peaks = {}
    for case, segment in (("first", None), ("resident", None), ("streamed", 1), ("full ram", 1)):
        if case == "full ram":
            monkeypatch.setattr(memory, "free_ram", lambda: 0)
        engine = "resident" if segment is None else "streamed"
        gc.collect()
        held = torch.cuda.memory_allocated()  # by earlier tests too
        model = load(folder, engine)
        report = fwanda_pruner.prune(
            model, method="fwanda", engine=engine, segment=segment, no_check=True, guard="none", **SETTINGS
        )
        peaks[case] = report.peak_memory_bytes - held
        del model
    inputs = (BLOCKS - 1) * 2 * TOKENS.shape[1] * SIZES["hidden_size"] * 2  # of two windows in bf16
    assert peaks["streamed"] < 0.6 * peaks["resident"]
    assert peaks["streamed"] < peaks["full ram"] - 0.5 * inputs


def test_auto_streams_what_does_not_fit(folder):
    assert not blocks_lie_apart(load(folder, "auto"))
    with pytest.warns(UserWarning, match="blocks are streamed"):
        assert blocks_lie_apart(load(folder, "auto", max_bytes=1 << 20))


def test_the_model_writes_text(folder):
    with pytest.warns(UserWarning, match="loads all weights for each token"):
        report = fwanda_pruner.prune(
            load(folder, "streamed"), tiny.tokenizer(), calibration="self", guard="none", nsamples=2, seqlen=16,
            progress=False,
        )  # fmt: skip
    assert report.engine == "streamed" and report.tokens_sha256
