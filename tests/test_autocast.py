"""torch.autocast changes no result of an op, and packed layers take what dense ones take."""

import copy
from contextlib import nullcontext

import pytest
import tiny
import torch
from test_ops import WRAPPERS, assert_same_bits

import fwanda_kernels as fk
from fwanda_kernels.testing import WEIGHT_DTYPES, make_weight, sample_arguments
from fwanda_pruner import pack_, prune
from fwanda_pruner.model.packed import PackedLinear

pytestmark = pytest.mark.fault("autocast")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_GPU)]
dtypes = pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
targets = pytest.mark.parametrize("target", [torch.bfloat16, torch.float16], ids=["to bf16", "to fp16"])


def large(device: str) -> dict[str, tuple]:
    """Arguments of ops that take another way where a matrix or a batch is large."""
    x, weight = make_weight(40, 300, seed=1, device=device), make_weight(48, 300, device=device)
    hessian = x.T @ x + torch.eye(300, device=device)
    mask = make_weight(48, 300, seed=2, device=device) > 0
    return {
        "obs_factor": (hessian, 0.01),
        "obs_prune_": (weight, hessian, None, "0.5", None, None, None, None, 128, 0.01),
        "packed_linear": (x, fk.pack_weight(weight, mask), weight[:, 0].clone(), 48, 300),
        "removed_sums": (x[:, :48].contiguous(), x, weight, fk.pack_mask(mask)),
        "accumulate_gram_": (torch.zeros(300, 300, device=device), x, None),
    }


def assert_unchanged(op: str, args: tuple, device: str, target: torch.dtype) -> None:
    """The call gives the same bits with autocast and without, and so do the arguments that it changes."""
    plain = copy.deepcopy(args)
    expected = WRAPPERS[op](*plain)
    with torch.autocast(device, target):
        found = WRAPPERS[op](*args)
    assert_same_bits([found, args], [expected, plain])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("device", DEVICES)
@targets
@dtypes
@pytest.mark.parametrize("op", WRAPPERS)
def test_no_op_gives_other_bits_under_autocast(op, dtype, target, device):
    assert_unchanged(op, sample_arguments(device, dtype)[op], device, target)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("device", DEVICES)
@targets
@pytest.mark.parametrize("op", large("cpu"))
def test_no_op_on_large_matrices_gives_other_bits_under_autocast(op, target, device):
    assert_unchanged(op, large(device)[op], device, target)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
@pytest.mark.parametrize("tokens", [1, 2, 17, 40])
def test_packed_products_of_any_number_of_tokens_keep_their_dtype(tokens, mode):
    weight, x = make_weight(48, 64), make_weight(tokens, 64, seed=1)
    with mode(), torch.autocast("cpu", torch.bfloat16):
        y = fk.packed_linear(x, fk.pack_weight(weight))
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, x @ weight.T)


@targets
@dtypes
@pytest.mark.parametrize("given", WEIGHT_DTYPES, ids=lambda d: f"of {d}".replace("torch.", ""))
@pytest.mark.parametrize("tokens", [2, 40])
def test_a_packed_layer_under_autocast_takes_and_returns_what_a_dense_one_does(tokens, given, dtype, target):
    weight, bias = make_weight(24, 64, dtype), torch.nn.Parameter(make_weight(1, 24, dtype, seed=2)[0])
    packed = fk.pack_weight(weight)
    layer, x = PackedLinear(packed, fk.check_packed(packed), bias), make_weight(tokens, 64, given, seed=1)
    with torch.no_grad(), torch.autocast("cpu", target):
        found, dense = layer(x), layer.unpacked()(x)
    assert found.dtype == dense.dtype == target
    torch.testing.assert_close(found, dense, rtol=0.02, atol=0.1)
    with torch.no_grad(), torch.autocast("cpu", target, enabled=False):
        assert layer(x.to(dtype)).dtype == dtype


def test_a_packed_layer_under_autocast_compiles_and_runs_on_the_meta_device():
    packed = fk.pack_weight(make_weight(24, 64))
    layer, x = PackedLinear(packed, fk.check_packed(packed), None), make_weight(3, 64, torch.bfloat16)
    torch._dynamo.reset()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        assert_same_bits(compiled, layer(x))
        assert layer.to("meta")(x.float().to("meta")).shape == (3, 24)


@targets
@dtypes
def test_a_packed_model_runs_under_autocast_as_the_dense_one(dtype, target):
    dense = tiny.llama().to(dtype)
    prune(dense, method="magnitude", sparsity=0.5)
    packed = pack_(copy.deepcopy(dense))
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad(), torch.autocast("cpu", target):
        expected = dense(ids).logits
        found = packed(ids).logits
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
