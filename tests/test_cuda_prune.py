"""The pruner on a CUDA device: the masks of the CPU from equal statistics, and exact counts everywhere."""

import copy

import pytest
import tiny
import torch

import fwanda_pruner
from fwanda_pruner import PruneConfig
from fwanda_pruner.methods_table import METHODS
from fwanda_pruner.model.targets import find_targets

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TOKENS = tiny.tokens(5, 24)
EVERY = [(m, a) for m, facts in METHODS.items() for a in facts.allocations]


@pytest.mark.fault("statistics on GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "wanda"},
        {"method": "wanda", "pattern": "2:4"},
        {"method": "fwanda", "allocation": "row"},
        {"method": "fwanda", "allocation": "global"},
    ],
    ids=str,
)
def test_equal_statistics_give_equal_weights_on_cpu_and_gpu(settings, dtype):
    model = tiny.llama(dtype=dtype)
    statistics = fwanda_pruner.collect(model, config=PruneConfig(), calibration=TOKENS, progress=False)
    on_gpu = copy.deepcopy(model).cuda()
    for each in (model, on_gpu):
        fwanda_pruner.prune(each, statistics=statistics, progress=False, **settings)
    for (name, cpu), gpu in zip(model.named_parameters(), on_gpu.parameters(), strict=True):
        assert torch.equal(cpu, gpu.cpu()), name


@pytest.mark.parametrize(("method", "allocation"), EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_method_runs_and_counts_exactly(method, allocation, dtype):
    model = tiny.llama(dtype=dtype).cuda()
    report = fwanda_pruner.prune(
        model, method=method, allocation=allocation, sparsity=0.6, calibration=TOKENS, eval=tiny.tokens(2, 24, seed=5),
        progress=False,
    )  # fmt: skip
    for row, target in zip(report.matrices, find_targets(model)[0], strict=True):
        assert int((target.weight == 0).sum()) == row.numel - row.kept + row.kept_zero
    assert report.sparsity["matrices"] == pytest.approx(0.6, abs=0.01)
    assert report.config["device"].startswith("cuda") and report.peak_memory_bytes > 0
    assert isinstance(report.energy, float) or report.energy.startswith("not ")
