"""The CUDA kernels for packed weights, run on a CPU by tests/emulated.h: unpacked weights, and products."""

import ctypes
import os
import shutil
import subprocess

import pytest
import torch
from helpers_cuda import ROOT, fake_driver
from helpers_packed import make_mask

import fwanda_kernels as fk
from fwanda_kernels.testing import make_weight

KERNELS = ("packed_linear_8", "packed_linear_16", "packed_linear_direct", "unpack")
CALL = """
static fwanda::PackedLinear argument;
extern "C" void run(int kernel, const fwanda::PackedLinear* p, unsigned blocks, unsigned size, unsigned cluster,
                    unsigned shared) {
  argument = *p;
  void (*kernels[])() = {[] { fwanda::packed_linear_8(argument); }, [] { fwanda::packed_linear_16(argument); },
                         [] { fwanda::packed_linear_direct(argument); }, [] { fwanda::unpack(argument); }};
  emulated::launch(kernels[kernel], blocks, size, cluster, shared);
}
"""
SHARED = 232_448  # bytes of a block on compute capability 9.0
MASKS = ("half", "none", "all", "few", "most", "rows differ", "columns differ", "blocks", "lanes differ")


@pytest.fixture(scope="module")
def packed():
    """The module that plans the launches, on top of the stand-in for the driver where there is no GPU."""
    if not torch.cuda.is_available():
        fake_driver()
    try:
        from fwanda_kernels._backends.cuda import packed
    except ImportError as error:
        pytest.skip(str(error))
    return packed


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a Launch."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("emulated")
    for name in ("common.cuh", "bad.h", "packed_chunks.cuh", "packed_decode.cuh", "packed.cu"):
        lines = (ROOT / "csrc" / name).read_text().splitlines()
        (folder / name).write_text("\n".join(line for line in lines if not line.startswith("extern __shared__")))
    shutil.copy(ROOT / "tests" / "emulated.h", folder / "packed_ptx.cuh")
    (folder / "packed.cpp").write_text('#include "packed.cu"\n' + CALL)
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-DWEIGHT=Bf16", "-DTHREADS=512"]
    options += ["-DLINEAR_8", "-DLINEAR_16", "-DLINEAR_DIRECT", "-DUNPACK"]
    subprocess.run([compiler, *options, "-o", "packed.so", "packed.cpp"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "packed.so"))

    def launch(step):
        kernel, (argument,) = KERNELS.index(step.kernel), step.parameters
        library.run(kernel, argument, step.blocks, step.threads, step.cluster, step.shared)

    return launch


def check_product(run, packed, mask, tokens, division) -> None:
    rows, cols = mask.shape
    weight, bias = make_weight(rows, cols, torch.bfloat16), make_weight(1, rows, torch.bfloat16, seed=2)[0]
    x, data = make_weight(tokens, cols, torch.bfloat16, seed=1), fk.pack_weight(weight, mask).clone()
    out = torch.full((tokens, rows), float("nan"), dtype=torch.bfloat16)
    for step in packed.plan_linear(x, data, bias, out, division):
        run(step)
    kept = weight.double().masked_fill(~mask, 0)
    expected = x.double() @ kept.T + bias.double()
    size = x.double().abs() @ kept.abs().T + bias.double().abs()
    assert ((out.double() - expected).abs() <= 2**-8 * size).all()


@pytest.mark.parametrize("shape", [(1, 8), (33, 520), (16, 1000)], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_unpacking_gives_every_bit(run, packed, kind, shape):
    weight, mask = make_weight(*shape, torch.bfloat16), make_mask(kind, *shape)
    data, out = fk.pack_weight(weight, mask).clone(), torch.full(shape, float("nan"), dtype=torch.bfloat16)
    for step in packed.plan_unpack(data, *shape, out):
        run(step)
    assert torch.equal(out.view(torch.int16), weight.view(torch.int16).masked_fill(~mask, 0))


@pytest.mark.parametrize("tokens", [1, 8, 16])
@pytest.mark.parametrize("kind", MASKS)
def test_products_are_near_fp64(run, packed, kind, tokens):
    check_product(run, packed, make_mask(kind, 33, 520), tokens, packed.divide(33, 520, tokens, 132, SHARED))


@pytest.mark.parametrize("warps", [1, 3, 16])
@pytest.mark.parametrize("cluster", [1, 2, 8])
@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_products_do_not_depend_on_how_they_are_divided(run, packed, tiles, cluster, warps):
    """More and fewer warps than chunks; tiles that several warps share, and the reverse; a smaller last cluster."""
    division = packed.fit(tiles, cluster, 2056, 3, SHARED, warps)
    check_product(run, packed, make_mask("rows differ", 70, 2056), 3, division)


def test_a_block_may_have_more_than_a_hundred_tiles(run, packed):
    check_product(run, packed, make_mask("rows differ", 2100, 520), 1, packed.fit(132, 1, 520, 1, SHARED, 5))


@pytest.mark.parametrize("tokens", [1, 13])
@pytest.mark.parametrize("cluster", [1, 2])
def test_products_are_right_without_a_copy_of_x(run, packed, cluster, tokens):
    division = packed.fit(2, cluster, 1096, tokens, SHARED, 5, direct=True)
    check_product(run, packed, make_mask("rows differ", 70, 1096), tokens, division)


@pytest.mark.parametrize("kind", ["half", "all", "blocks"])
def test_products_are_right_with_the_smallest_buffers(run, packed, kind):
    division = packed.fit(2, 1, 5000, 5, 73_000, 2)
    assert division.buffer < 1.5 * packed.LARGEST_CHUNK
    check_product(run, packed, make_mask(kind, 40, 5000), 5, division)


def test_a_weight_of_nan_and_inf_is_multiplied_as_it_is(run, packed):
    weight = make_weight(16, 256, torch.bfloat16)
    weight[3, 7], weight[5, 9] = float("nan"), float("inf")
    mask = make_mask("half", 16, 256)
    mask[3, 7], mask[5, 9] = False, True
    data, x, out = fk.pack_weight(weight, mask).clone(), torch.ones(1, 256).bfloat16(), torch.zeros(1, 16).bfloat16()
    run(packed.plan_linear(x, data, None, out, packed.divide(16, 256, 1, 132, SHARED))[0])
    assert out.isinf().nonzero().tolist() == [[0, 5]] and not out.isnan().any()
