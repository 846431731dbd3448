"""Packed weights on a GPU: the same bits when unpacked, and products near those of fp64, always the same."""

import pytest
import torch

import fwanda_kernels as fk
from fwanda_kernels.testing import make_weight

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}
SHAPES = [(1, 8), (16, 256), (17, 264), (130, 1000), (64, 4096), (300, 2056), (4096, 512), (48, 11008)]
SHAPES += [(33, 255), (5, 7)]  # no multiples of 8: through the reference
MASKS = ["half", "none", "all", "few", "rows differ", "columns differ", "blocks"]


def make_mask(kind: str, rows: int, cols: int) -> torch.Tensor:
    draw = torch.rand(rows, cols, device="cuda", generator=torch.Generator("cuda").manual_seed(rows + cols))
    place = torch.arange(cols, device="cuda")
    return {
        "half": draw < 0.5,
        "none": draw < 0,
        "all": draw >= 0,
        "few": draw < 0.1,
        "rows differ": draw < torch.linspace(0, 1, rows, device="cuda")[:, None],
        "columns differ": (place % 7 == 0).expand(rows, cols),
        "blocks": (place < cols // 2).expand(rows, cols) | (torch.arange(rows, device="cuda") % 3 == 0)[:, None],
    }[kind]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_unpacking_gives_every_bit_on_gpu(kind, dtype):
    for shape in SHAPES:
        weight, mask = make_weight(*shape, dtype, device="cuda"), make_mask(kind, *shape)
        dense = fk.unpack_weight(fk.pack_weight(weight, mask))
        kind_of_bits = torch.int16 if dtype.itemsize == 2 else torch.int32
        assert torch.equal(dense.view(kind_of_bits), weight.view(kind_of_bits).masked_fill(~mask, 0)), shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 16, 17])
@pytest.mark.parametrize("kind", MASKS)
def test_products_are_near_fp64_and_the_same_every_time_on_gpu(kind, tokens, dtype):
    for shape in SHAPES:
        weight, mask = make_weight(*shape, dtype, device="cuda"), make_mask(kind, *shape)
        x, bias = (make_weight(n, shape[i], dtype, seed=9, device="cuda") for n, i in ((tokens, 1), (1, 0)))
        packed, kept = fk.pack_weight(weight, mask), weight.double().masked_fill(~mask, 0)
        found = fk.packed_linear(x, packed, bias[0])
        expected = x.double() @ kept.T + bias[0].double()
        size = x.double().abs() @ kept.abs().T + bias[0].double().abs()
        assert ((found.double() - expected).abs() <= EPS[dtype] * size + 1e-30).all(), shape
        assert torch.equal(found, fk.packed_linear(x, packed, bias[0])), shape


def test_products_run_in_cuda_graphs_and_on_other_streams_on_gpu():
    weight, x = make_weight(256, 1024, torch.bfloat16, device="cuda"), torch.ones(3, 1024, device="cuda").bfloat16()
    packed = fk.pack_weight(weight, make_mask("half", 256, 1024))
    header = fk.read_packed_header(packed)
    wanted = fk.packed_linear(x, packed, header=header)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fk.packed_linear(x, packed, header=header)
    x.mul_(2)
    graph.replay()
    assert torch.equal(found, fk.packed_linear(x, packed))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again = fk.packed_linear(x / 2, packed, header=header)
    stream.synchronize()
    assert torch.equal(again, wanted)
