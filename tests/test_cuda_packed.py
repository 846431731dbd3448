"""Packed weights on a GPU, through CUDA and Triton: every bit when unpacked; products near fp64, always the same."""

from functools import cache

import pytest
import torch
from helpers_packed import make_mask

import fwanda_kernels as fk
from fwanda_kernels.testing import make_weight

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = {BF16: 2**-8, FP16: 2**-11, FP32: 2**-20}
SHAPES = [(1, 8), (16, 256), (17, 264), (130, 1000), (64, 4096), (300, 2056), (4096, 512), (48, 11008), (2100, 1536)]
SHAPES += [(33, 255), (5, 7)]  # no multiples of 8 columns: not through CUDA
MASKS = ["half", "none", "all", "few", "most", "rows differ", "columns differ", "blocks", "lanes differ"]
CALLS = [("native", BF16, n) for n in (1, 2, 7, 8, 9, 16, 17)] + [("native", FP16, n) for n in (3, 16)]
CALLS += [("triton", BF16, 1), ("triton", FP16, 16), ("triton", FP32, 5), ("triton", BF16, 17)]
BACKENDS = ["native", "triton"]


@cache
def prepare(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A packed weight, and the dense one."""
    weight, mask = make_weight(*shape, dtype, device="cuda"), make_mask(kind, *shape, device="cuda")
    return fk.pack_weight(weight, mask), weight.masked_fill(~mask, 0)


def shapes_of(backend: str) -> list[tuple[int, int]]:
    return [shape for shape in SHAPES if backend != "native" or shape[1] % 8 == 0]


@pytest.mark.parametrize(("backend", "dtype"), [("native", BF16), ("native", FP16), ("triton", BF16), ("triton", FP32)])
@pytest.mark.parametrize("kind", MASKS)
def test_unpacking_gives_every_bit_on_gpu(kind, backend, dtype):
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    for shape in shapes_of(backend):
        packed, dense = prepare(kind, shape, dtype)
        with fk.use_backend(backend):
            found = fk.unpack_weight(packed)
        assert torch.equal(found.view(bits), dense.view(bits)), shape


@pytest.mark.parametrize(("backend", "dtype", "tokens"), CALLS)
@pytest.mark.parametrize("kind", MASKS)
def test_products_are_near_fp64_and_the_same_every_time_on_gpu(kind, backend, dtype, tokens):
    for shape in shapes_of(backend):
        packed, dense = prepare(kind, shape, dtype)
        header = fk.read_packed_header(packed)
        x, bias = (make_weight(n, shape[i], dtype, seed=9, device="cuda") for n, i in ((tokens, 1), (1, 0)))
        with fk.use_backend(backend):
            found, *again = [fk.packed_linear(x, packed, bias[0], header=header) for _ in range(4)]
        expected = x.double() @ dense.double().T + bias[0].double()
        size = x.double().abs() @ dense.double().abs().T + bias[0].double().abs()
        assert ((found.double() - expected).abs() <= EPS[dtype] * size + 1e-30).all(), shape
        assert all(torch.equal(found, other) for other in again), shape


def test_every_way_to_divide_a_product_gives_it_on_gpu():
    packed = pytest.importorskip("fwanda_kernels._backends.cuda.packed")
    from fwanda_kernels._backends.cuda import multiprocessors, run, shared_bytes

    data, dense = prepare("rows differ", (2100, 1536), BF16)
    x = make_weight(9, 1536, BF16, seed=9, device="cuda")
    expected, size = x.double() @ dense.double().T, x.double().abs() @ dense.double().abs().T
    for tokens in (3, 9):
        for tiles, cluster, warps in ((1, 1, 16), (2, 2, 16), (7, 4, 12), (16, 6, 3), (3, 1, 1), (132, 2, 8)):
            for direct in (False, True):
                division = packed.fit(
                    tiles, min(cluster, 4), 1536, tokens, shared_bytes(x), min(warps, 12) if direct else warps, direct
                )
                out = torch.full((tokens, 2100), float("nan"), dtype=BF16, device="cuda")
                run(x, packed.plan_linear(x[:tokens], data, None, out, division))
                assert ((out.double() - expected[:tokens]).abs() <= EPS[BF16] * size[:tokens]).all(), division
    assert packed.divide(2100, 1536, 3, multiprocessors(x), shared_bytes(x)).cluster >= 1


def test_products_use_what_the_kernels_right_before_wrote_on_gpu():
    """Of the weight and of x, both written again and again."""
    pytest.importorskip("fwanda_kernels._backends.cuda.packed")
    shape = (4096, 2048)
    packs = [prepare(kind, shape, BF16)[0] for kind in ("half", "few")]
    xs = [make_weight(2, shape[1], BF16, seed=i, device="cuda") for i in range(2)]
    expected = [fk.packed_linear(x, p) for x, p in zip(xs, packs, strict=True)]
    headers = [fk.read_packed_header(p) for p in packs]
    torch.cuda.synchronize()
    weight, x = torch.empty(max(map(len, packs)), dtype=torch.uint8, device="cuda"), torch.empty_like(xs[0])
    found = []
    for i in (0, 1) * 30:
        weight[: len(packs[i])].copy_(packs[i])
        x.copy_(xs[i])
        found.append(fk.packed_linear(x, weight[: len(packs[i])], header=headers[i]))
    assert all(torch.equal(out, expected[i % 2]) for i, out in enumerate(found))


@pytest.mark.parametrize("backend", BACKENDS)
def test_products_run_in_cuda_graphs_and_on_other_streams_on_gpu(backend):
    (packed, _), x = prepare("half", (300, 2056), BF16), torch.ones(3, 2056, device="cuda").bfloat16()
    header = fk.read_packed_header(packed)
    with fk.use_backend(backend):
        wanted = fk.packed_linear(x, packed, header=header)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first = fk.packed_linear(x, packed, header=header)
            found = fk.packed_linear(first.repeat(1, 7)[:, :2056].contiguous(), packed, header=header)
        x.mul_(2)
        graph.replay()
        assert torch.equal(first, 2 * wanted)
        assert torch.equal(found, fk.packed_linear((2 * wanted).repeat(1, 7)[:, :2056].contiguous(), packed))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            again = fk.packed_linear(x / 2, packed, header=header)
        stream.synchronize()
        assert torch.equal(again, wanted)


def test_a_packed_weight_that_was_written_just_before_is_read_whole_on_gpu():
    """A kernel may start before the one before it has ended."""
    (packed, dense), x = prepare("half", (4096, 512), BF16), make_weight(2, 512, BF16, seed=9, device="cuda")
    header, wanted = fk.read_packed_header(packed), None
    for _ in range(20):
        target = torch.zeros_like(packed)
        torch.cuda._sleep(100_000)
        target.copy_(packed)
        found = fk.packed_linear(x, target, header=header)
        wanted = found if wanted is None else wanted
        assert torch.equal(found, wanted)
    torch.testing.assert_close(wanted, x @ dense.T, rtol=2**-6, atol=2**-4)


def test_products_compile_on_gpu():
    (packed, _), x = prepare("half", (300, 2056), BF16), make_weight(4, 2056, BF16, seed=9, device="cuda")
    header = fk.read_packed_header(packed)

    def layer(x):
        return torch.relu(fk.packed_linear(x, packed, header=header)) + 1

    assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_product_runs_on_the_device_of_its_tensors_on_gpu(backend):
    packed, _ = prepare("half", (300, 2056), BF16)
    x = make_weight(4, 2056, BF16, seed=9, device="cuda")
    with fk.use_backend(backend):
        there = fk.packed_linear(x.to("cuda:1"), packed.to("cuda:1"))
        assert there.device == torch.device("cuda:1") and torch.equal(there.cpu(), fk.packed_linear(x, packed).cpu())
