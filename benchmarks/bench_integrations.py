"""The selection step of each host with and without the kernels. conftest.py says what is printed and written.

A host is a pruner that one of our adapters serves. "Without" is the host's own step. A host that cannot rank by input
norms gets a stable sort in plain torch inside its own calls instead. Both must give the same masks before any timing.
"""

import copy
import importlib

import pytest
import torch
from bench_ops import serving_backend, synchronised
from lib.cases.case import Case, random_scale, same
from lib.machine import this_device
from lib.speed_tables import HOSTS
from torch import nn
from torch.ao.pruning import BaseSparsifier
from torch.nn.utils import prune

import fwanda_kernels as fk
from fwanda_kernels.testing import bench
from fwanda_pruner.integrations.ao_sparsifier import WandaSparsifier
from fwanda_pruner.integrations.nn_prune import WandaUnstructured, global_fwanda_unstructured, wanda_unstructured
from fwanda_pruner.integrations.wanda_style import wanda_mask

HERE = this_device()
ROWS, COLS = {"cuda": (11008, 4096), "cpu": (1024, 1024)}[HERE]
GLOBAL_LAYERS = {"cuda": 4, "cpu": 2}[HERE]


class StableSort(prune.BasePruningMethod):
    """Rows by a stable sort of the scores, half removed."""

    PRUNING_TYPE = "global"

    def compute_mask(self, t, default_mask):
        removed = torch.sort(t, dim=1, stable=True).indices[:, : t.shape[1] // 2]
        return default_mask.clone().scatter_(1, removed, 0)


class StableSortSparsifier(BaseSparsifier):
    """Rows, or groups of four, by a stable sort of |W| * norm, half removed."""

    def __init__(self, norm, block=None):
        super().__init__()
        self.norm, self.block = norm, block

    def update_mask(self, module, tensor_name, **_):
        parametrization = module.parametrizations.weight
        scores = parametrization.original.abs() * self.norm
        scores = scores if self.block is None else scores.view(-1, self.block)
        mask = torch.ones_like(scores)
        mask.scatter_(1, torch.sort(scores, dim=1, stable=True).indices[:, : scores.shape[1] // 2], 0)
        parametrization[0].mask.copy_(mask.view_as(parametrization[0].mask))


def statistics_of(layer: nn.Linear) -> fk.LayerStatistics:
    rows, cols = layer.weight.shape
    x2, g2 = (random_scale(size, HERE).square() for size in (cols, rows))
    return fk.LayerStatistics(x2, g2, n_tokens=1024)


def linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(COLS, ROWS, bias=False, device=HERE)


def pairs(count: int) -> list[tuple[nn.Linear, fk.LayerStatistics]]:
    layers = [linear(seed) for seed in range(count)]
    return [(layer, statistics_of(layer)) for layer in layers]


def dense_again(layers: list[nn.Linear]):
    """A function that takes the masks off and restores the weights."""

    def reset():
        for layer in layers:
            if prune.is_pruned(layer):
                original = layer.weight_orig.data
                prune.remove(layer, "weight")
                layer.weight.data = original

    return reset


def nn_prune_rows() -> Case:
    layers = pairs(2)

    def without(layer, statistics):
        scores = layer.weight.detach().abs() * statistics.x2.sqrt()
        StableSort.apply(layer, "weight", importance_scores=scores)

    reset = dense_again([layer for layer, _ in layers])
    ours = [lambda a=a: wanda_unstructured(a[0], "weight", a[1], amount=0.5) for a in layers]
    naive = [lambda a=a: without(*a) for a in layers]
    return Case(ours, naive, same_masks(ours, naive, reset, [layer for layer, _ in layers]), None, reset)


def nn_prune_global() -> Case:
    """Global pruning. The host gets finished scores, while ours computes them too."""
    layers = pairs(GLOBAL_LAYERS)
    parameters = [(layer, "weight") for layer, _ in layers]
    statistics = dict(zip(parameters, (s for _, s in layers), strict=True))
    modules = [layer for layer, _ in layers]
    reset = dense_again(modules)

    def with_kernels():
        global_fwanda_unstructured(parameters, statistics, amount=0.5, row_exponent=1, layer_exponent=1)

    scores = {  # with both exponents 1: sqrt(omega_i) |W_ij| norm_j, up to one common factor
        key: key[0].weight.detach().abs() * s.x2.sqrt() * s.g2.sqrt()[:, None] for key, s in statistics.items()
    }

    def without():
        prune.global_unstructured(parameters, prune.L1Unstructured, importance_scores=scores, amount=0.5)

    def check():
        masks = []
        for call in (with_kernels, without):
            reset()
            call()
            masks.append(torch.cat([m.weight_mask.flatten() for m in modules]))
        reset()
        different = int((masks[0] != masks[1]).sum())
        assert masks[0].sum() == masks[1].sum() and different <= len(masks[0]) // 10000, different

    return Case([with_kernels], [without], check, None, reset)


def nn_prune_again() -> Case:
    """The mask of a second pass alone. The first pass has removed half of the weights."""
    layers = pairs(2)
    masks = [fk.row_topk_mask(layer.weight.detach(), s.x2.sqrt(), COLS // 2).float() for layer, s in layers]
    keep = torch.full((ROWS,), COLS // 4, device=HERE)

    def with_kernels(layer, statistics, mask):
        return WandaUnstructured(statistics.x2.sqrt(), keep).compute_mask(layer.weight, mask)

    def without(layer, statistics, mask):
        scores = (layer.weight.detach().abs() * statistics.x2.sqrt()).masked_fill(mask == 0, -1)
        removed = torch.sort(scores, dim=1, stable=True).indices[:, : COLS - COLS // 4]
        return torch.ones_like(mask).scatter_(1, removed, 0)

    arguments = [(layer, s, mask) for (layer, s), mask in zip(layers, masks, strict=True)]
    return functions(with_kernels, without, arguments)


def ao_rows(block=None) -> Case:
    layer, statistics = pairs(1)[0]
    model = nn.Sequential(layer)
    theirs = copy.deepcopy(model)
    sparsifier = WandaSparsifier(semi_structured_block_size=block)
    sparsifier.prepare(model, None)
    x = torch.randn(4, COLS, device=HERE) * statistics.x2.sqrt()
    with torch.no_grad():
        model(x)
    sparsifier.step()
    without = StableSortSparsifier(sparsifier.state["0.weight"]["x2"].sqrt(), block)
    without.prepare(theirs, None)

    def check():
        sparsifier.step()
        without.step()
        same(*(m[0].parametrizations.weight[0].mask for m in (model, theirs)))

    return Case([sparsifier.step], [without.step], check, None)


def fork(prune_n=0, prune_m=0) -> Case:
    def without(weight, scaler_row):
        metric = weight.abs() * scaler_row.sqrt().reshape(1, -1)
        mask = torch.zeros_like(metric, dtype=torch.bool)
        if not prune_n:
            order = torch.sort(metric, dim=-1, stable=True).indices
            return mask.scatter_(1, order[:, : COLS // 2], True)
        for a in range(0, COLS, prune_m):
            lowest = torch.topk(metric[:, a : a + prune_m].float(), prune_n, dim=1, largest=False).indices
            mask.scatter_(1, a + lowest, True)
        return mask

    arguments = [(layer.weight.detach(), s.x2) for layer, s in pairs(2)]
    return functions(lambda w, s: wanda_mask(w, s, 0.5, prune_n, prune_m), without, arguments)


def compressor_wanda(prune_n=0, prune_m=0) -> Case:
    """The host's function that returns the pruned copy of a weight."""
    module, use_fwanda_kernels = llm_compressor("wanda")
    settings = {"sparsity": 0.5, "prune_n": prune_n, "prune_m": prune_m}

    def caller(function):
        return lambda layer, s: function(module=layer, row_scalars_dict={layer: s.x2}, **settings)

    with use_fwanda_kernels():
        ours = caller(module.sparsify_weight)
    return functions(ours, caller(module.sparsify_weight), pairs(2))


def compressor_sparsegpt(prune_n=0, prune_m=0) -> Case:
    """The host's OBS walk over one layer, with the Cholesky factor. Masks may differ where scores are nearly equal."""
    module, use_fwanda_kernels = llm_compressor("sparsegpt")
    layer = linear(0)
    x = torch.randn(2 * COLS, COLS, device=HERE) * random_scale(COLS, HERE)
    hessian = x.T @ x / len(x)
    settings = {"sparsity": 0.5, "prune_n": prune_n, "prune_m": prune_m, "block_size": 128, "dampening_frac": 0.01}

    def caller(function):
        def call():
            hessians = {layer: hessian.clone()}
            return function(module=layer, hessians_dict=hessians, preserve_sparsity_mask=False, **settings)[1]

        return torch.no_grad()(call)

    with use_fwanda_kernels():
        ours = caller(module.sparsify_weight)
    theirs = caller(module.sparsify_weight)

    def check():
        different = int(((ours() == 0) != (theirs() == 0)).sum())
        assert different <= layer.weight.numel() // 10000, different

    return Case([ours], [theirs], check, None)


def llm_compressor(modifier: str):
    """The host's module of a modifier, and our context manager."""
    pytest.importorskip("llmcompressor", reason="llm-compressor is missing: pip install llmcompressor")
    from fwanda_pruner.integrations.llmcompressor import use_fwanda_kernels

    return importlib.import_module(f"llmcompressor.modifiers.pruning.{modifier}.base"), use_fwanda_kernels


def functions(ours, naive, arguments: list[tuple]) -> Case:
    """Two functions that change nothing, on the same arguments."""

    def check():
        for a in arguments:
            same(ours(*a), naive(*a))

    return Case([lambda a=a: ours(*a) for a in arguments], [lambda a=a: naive(*a) for a in arguments], check, None)


def same_masks(ours, naive, reset, layers):
    """A check that calls in pairs leave the same masks on the layers."""

    def check():
        for one, other in zip(ours, naive, strict=True):
            masks = []
            for call in (one, other):
                reset()
                call()
                masks.append(torch.cat([m.weight_mask.flatten() for m in layers if prune.is_pruned(m)]))
            same(*masks)
        reset()

    return check


SHAPE = f"fp32, {ROWS} x {COLS}"
NN_PRUNE, AO_PRUNING, FORK, LLM_COMPRESSOR = HOSTS
# host, name of the case, function that makes it, op whose backend is shown
CASES = [
    (NN_PRUNE, f"Wanda, {SHAPE}", nn_prune_rows, "row_topk_mask"),
    (NN_PRUNE, f"second pass, {SHAPE}", nn_prune_again, "row_topk_mask"),
    (NN_PRUNE, f"F-Wanda global, {GLOBAL_LAYERS} x {SHAPE}", nn_prune_global, "select_threshold"),
    (AO_PRUNING, f"Wanda, {SHAPE}", ao_rows, "row_topk_mask"),
    (AO_PRUNING, f"2:4, {SHAPE}", lambda: ao_rows(4), "nm_mask"),
    (FORK, f"Wanda, {SHAPE}", fork, "row_topk_mask"),
    (FORK, f"prune 2:4, {SHAPE}", lambda: fork(2, 4), "nm_mask"),
    (LLM_COMPRESSOR, f"Wanda, {SHAPE}", compressor_wanda, "row_topk_prune_"),
    (LLM_COMPRESSOR, f"Wanda, prune 2:4, {SHAPE}", lambda: compressor_wanda(2, 4), "nm_prune_"),
    (LLM_COMPRESSOR, f"SparseGPT, {SHAPE}", compressor_sparsegpt, "obs_prune_"),
    (LLM_COMPRESSOR, f"SparseGPT, prune 2:4, {SHAPE}", lambda: compressor_sparsegpt(2, 4), "obs_prune_"),
]


@pytest.mark.parametrize(("host", "name", "make", "op"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_host(host, name, make, op, device, results, benchmark):
    case = make()
    case.check()  # masks that differ get no speed
    ours = bench(case.ours, device=device, reset=case.reset)
    naive = bench(case.naive, device=device, reset=case.reset, rounds=3)
    row = {
        "op": host,
        "case": name,
        "backend": serving_backend(op, device),
        "us": round(ours.us, 2),
        "joules": None,
        "naive_us": round(naive.us, 1),
        "bytes": None,
    }
    results.add(row)
    benchmark.extra_info.update(row)
    benchmark.pedantic(synchronised(case.ours[0], device), setup=case.reset, rounds=3)
