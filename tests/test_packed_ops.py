"""Packed weights: every bit comes back, the layout is that of docs/packed.md, and products are right."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch

import fwanda_kernels as fk
from fwanda_kernels._build import find_library
from fwanda_kernels.testing import WEIGHT_DTYPES, make_weight

dtypes = pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
SHAPES = [(1, 1), (3, 5), (16, 256), (17, 257), (33, 576), (40, 100), (64, 700), (0, 5), (5, 0)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
BACKENDS = ["reference", *(["native"] if find_library() else [])]
backends = pytest.mark.parametrize("backend", BACKENDS)
EPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-21}


def random_mask(rows, cols, density=0.5, seed=0):
    return torch.rand(rows, cols, generator=torch.Generator().manual_seed(seed)) < density


def masks(rows, cols) -> dict[str, torch.Tensor]:
    """Masks of every kind: none, all, half, n:m, and rows and columns that differ."""
    varied = random_mask(rows, cols) & (torch.rand(rows, 1, generator=torch.Generator().manual_seed(1)) < 0.6)
    columns = torch.arange(cols).expand(rows, cols)
    return {
        "none": random_mask(rows, cols, 0),
        "all": random_mask(rows, cols, 1.1),
        "half": random_mask(rows, cols),
        "2:4": columns % 4 < 2,
        "rows differ": varied,
        "columns differ": columns % 7 == 0,
    }


def bits(tensor):
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


@dtypes
@shapes
@backends
def test_every_bit_comes_back(backend, shape, dtype):
    weight = make_weight(*shape, dtype)
    if weight.numel() > 8:
        weight.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40]).to(dtype)
    for name, mask in masks(*shape).items():
        packed = fk.pack_weight(weight, mask)
        with fk.use_backend(backend):
            dense = fk.unpack_weight(packed)
        assert torch.equal(bits(dense), bits(weight).masked_fill(~mask, 0)), name
        assert torch.equal(fk.unpack_mask(packed), mask), name
        assert fk.check_packed(packed) == fk.read_packed_header(packed)


def test_the_mask_decides_and_not_the_value():
    weight = torch.zeros(4, 8)
    mask = random_mask(4, 8)
    assert torch.equal(fk.unpack_mask(fk.pack_weight(weight, mask)), mask)
    assert not fk.unpack_mask(fk.pack_weight(weight)).any()
    assert fk.unpack_mask(fk.pack_weight(-weight)).all()  # -0.0 has a bit that must come back


def test_strided_and_transposed_weights_pack_like_contiguous_ones():
    weight = make_weight(48, 80)
    expected = fk.pack_weight(weight)
    assert torch.equal(fk.pack_weight(weight.T.contiguous().T), expected)
    assert torch.equal(fk.pack_weight(weight.repeat(1, 2)[:, :80]), expected)


@pytest.mark.fault("file size")
@pytest.mark.parametrize(("density", "share"), [(0.5, 0.57), (0.3, 0.37)])
@pytest.mark.parametrize("shape", [(576, 576), (192, 576), (1536, 576), (576, 1536), (1024, 1024)], ids=str)
def test_size_of_bf16(shape, density, share):
    weight = make_weight(*shape, torch.bfloat16)
    packed = fk.pack_weight(weight, random_mask(*shape, density))
    assert len(packed) <= share * 2 * weight.numel()


@dtypes
def test_layout_is_that_of_the_documentation(dtype):
    """A plain restatement, value by value."""
    weight, mask = make_weight(40, 330, dtype), random_mask(40, 330)
    packed = fk.pack_weight(weight, mask)
    order = sorted(range(40), key=lambda row: -int(mask[row].sum()))  # sorted() is stable
    rows = packed[64 : 64 + 4 * 48].view(torch.int32).tolist()
    assert rows == order + [-1] * 8
    offsets = packed[64 + 4 * 48 :][: 4 * 7].view(torch.int32).tolist()  # 3 tiles of 2 chunks
    data = packed[64 + 4 * 48 + 32 :]
    size, per_word = dtype.itemsize, 4 // dtype.itemsize
    for chunk in range(6):
        tile, first = chunk // 2, chunk % 2 * 256
        pairs = 4 if first == 0 else 2  # 330 - 256 columns are two pairs of 32-column steps
        lanes, words = [], [0] * (32 * pairs)
        for lane in range(32):
            values = []
            for pair in range(pairs):
                for bit in range(32):
                    place = tile * 16 + lane // 4 + bit // 8 % 2 * 8
                    col = first + pair * 64 + bit // 16 * 32 + lane % 4 * 8 + bit % 8
                    if place < 40 and col < 330 and mask[order[place], col]:
                        words[pair * 32 + lane] |= 1 << bit
                        values.append(weight[order[place], col])
            lanes.append(values)
        common = min(len(values) // per_word for values in lanes)
        expected = [v for k in range(common) for values in lanes for v in values[k * per_word : (k + 1) * per_word]]
        whole = [len(values) // per_word * per_word for values in lanes]
        expected += [v for values, n in zip(lanes, whole, strict=True) for v in values[common * per_word : n]]
        expected += [v for values, n in zip(lanes, whole, strict=True) for v in values[n:]]
        part = data[16 * offsets[chunk] : 16 * offsets[chunk + 1]]
        assert [word % 2**32 for word in part[: 128 * pairs].view(torch.int32).tolist()] == words
        assert torch.equal(bits(part[128 * pairs :].view(dtype)[: len(expected)]), bits(torch.stack(expected)))
        assert len(part) == -(-(128 * pairs + size * len(expected)) // 16) * 16


@dtypes
@backends
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 16, 17])
def test_product_agrees_with_fp64(tokens, backend, dtype):
    for shape in [(1, 1), (17, 257), (33, 576), (200, 100)]:
        weight, bias = make_weight(*shape, dtype), make_weight(1, shape[0], dtype, seed=2)[0]
        x = make_weight(tokens, shape[1], dtype, seed=1)
        for name, mask in masks(*shape).items():
            packed = fk.pack_weight(weight, mask)
            kept = weight.masked_fill(~mask, 0).double()
            expected = x.double() @ kept.T + bias.double()
            with fk.use_backend(backend):
                found = fk.packed_linear(x, packed, bias)
                batched = fk.packed_linear(x[None], packed)
            largest = x.double().abs() @ kept.abs().T + bias.double().abs()
            assert found.dtype == dtype and batched.shape == (1, tokens, shape[0])
            assert bool(((found.double() - expected).abs() <= EPS[dtype] * largest).all()), name


@pytest.mark.skipif(find_library() is None, reason="not built: python -m fwanda_kernels --build cpu")
@dtypes
def test_product_does_not_depend_on_the_number_of_threads(dtype):
    weight, x = make_weight(512, 640, dtype), make_weight(4, 640, dtype, seed=1)
    packed = fk.pack_weight(weight, random_mask(512, 640))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(fk.packed_linear(x, packed))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.skipif(find_library() is None, reason="not built: python -m fwanda_kernels --build cpu")
@pytest.mark.parametrize("isa", ["plain", "avx2"])
def test_older_instructions_give_the_same_products(isa, tmp_path):
    code = """if True:
        import sys, torch, fwanda_kernels as fk
        from fwanda_kernels.testing import WEIGHT_DTYPES, make_weight
        results = []
        for dtype in WEIGHT_DTYPES:
            mask = make_weight(33, 330, seed=3) > 0
            packed = fk.pack_weight(make_weight(33, 330, dtype), mask)
            results += [fk.packed_linear(make_weight(t, 330, dtype, seed=1), packed).float() for t in (1, 5)]
            results.append(fk.unpack_weight(packed).float())
        torch.save(results, sys.argv[1])"""
    found = {}
    for name in (isa, ""):
        environment = {**os.environ, "FWANDA_CPU_ISA": name}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "out.pt")], env=environment, check=True)
        found[name] = torch.load(tmp_path / "out.pt")
    for i, (a, b) in enumerate(zip(found[isa], found[""], strict=True)):
        if i % 3 == 2:
            assert torch.equal(a, b)  # unpacked weights
        else:
            torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-4)


# bad input


def altered(packed, place, value):
    packed = packed.clone()
    packed[place] = value
    return packed


@pytest.mark.fault("packed file")
def test_what_is_no_whole_packed_weight_is_refused_in_one_line():
    packed = fk.pack_weight(make_weight(20, 300))
    for wrong, message in [
        (packed[:40], "must begin with a header"),
        (packed[:200], "bytes by its header, got 200"),
        (packed[:-16], f"bytes by its header, got {len(packed) - 16}"),
        (torch.cat([packed, packed[:16]]), "bytes by its header"),
        (altered(packed, 0, 0), "this is no packed weight"),
        (altered(packed, 4, 2), "version 1, got version 2"),
        (altered(packed, 8, 9), "unknown dtype"),
        (packed.int(), "must be [N] uint8"),
    ]:
        for call in (fk.read_packed_header, fk.unpack_weight, lambda p: fk.packed_linear(torch.ones(1, 300), p)):
            with pytest.raises(ValueError, match=r"^\w+: packed must|^\w+: packed has") as error:
                call(wrong)
            assert message in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ValueError, match="differs from the SHA-256"):
        fk.check_packed(altered(packed, -20, 1 + packed[-20]))


@pytest.mark.fault("packed file")
@pytest.mark.skipif(find_library() is None, reason="not built: python -m fwanda_kernels --build cpu")
def test_bits_that_do_not_fit_their_offsets_are_refused_and_read_nothing_else():
    weight = make_weight(16, 256, torch.bfloat16)
    packed = fk.pack_weight(weight, random_mask(16, 256, 0.2))
    wrong = packed.clone()
    wrong[64 + 64 + 16 :][:512] = 255  # all bits set, for which there are too few values
    with pytest.raises(ValueError, match="packed_linear: packed must have the rows, .*it has been altered"):
        fk.packed_linear(weight[:1], wrong)


@pytest.mark.fault("packed file")
@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize(
    ("part", "at", "size"),
    [
        ("order", 64, 2),
        ("order", 64, 80),
        ("padding", 64 + 4 * 25, 4),
        ("offsets", 64 + 128 + 1, 2),
        ("bits", 64 + 128 + 16, 512),
    ],  # fmt: skip
)
def test_altered_bytes_are_one_line_for_every_op_that_reads_them(part, at, size, backend):
    if backend == "native" and find_library() is None:
        pytest.skip("not built: python -m fwanda_kernels --build cpu")
    packed = fk.pack_weight(make_weight(20, 200), random_mask(20, 200, 0.2))
    packed[at : at + size] = 0 if part == "padding" else 255
    calls = {
        "unpack_mask": lambda: fk.unpack_mask(packed),
        "unpack_weight": lambda: fk.unpack_weight(packed),
        "packed_linear": lambda: fk.packed_linear(torch.ones(2, 200), packed),
    }
    if part == "bits":  # any bits are a mask
        del calls["unpack_mask"]
    for op, call in calls.items():
        with fk.use_backend(backend), pytest.raises(ValueError, match=f"^{op}: packed must have the rows, .*altered"):
            call()


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("shape", [(40, 300), (10, 30), (2000, 3000), (16, 300)], ids=str)
def test_the_header_of_another_weight_is_one_line(shape, backend):
    if backend == "native" and find_library() is None:
        pytest.skip("not built: python -m fwanda_kernels --build cpu")
    packed, other = fk.pack_weight(make_weight(20, 300)), fk.PackedHeader(shape, torch.float32, "")
    with fk.use_backend(backend):
        for call in (
            lambda: fk.unpack_weight(packed, other),
            lambda: fk.packed_linear(torch.ones(2, shape[1]), packed, header=other),
        ):
            with pytest.raises(ValueError, match="packed must have the rows, chunks and values of its header"):
                call()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_sparse_and_nested_tensors_are_refused_with_a_header_too(layout):
    packed, x, bias = fk.pack_weight(make_weight(20, 300)), torch.ones(2, 300), torch.ones(20)
    header = fk.read_packed_header(packed)

    def nested(tensor):
        return torch.nested.nested_tensor([tensor, tensor], layout=layout)

    for name, call in [
        ("packed", lambda: fk.unpack_weight(packed.to_sparse(), header)),
        ("packed", lambda: fk.packed_linear(x, packed.to_sparse(), header=header)),
        ("packed", lambda: fk.unpack_weight(nested(packed), header)),
        ("x", lambda: fk.packed_linear(x.to_sparse(), packed, header=header)),
        ("x", lambda: fk.packed_linear(nested(x), packed, header=header)),
        ("bias", lambda: fk.packed_linear(x, packed, nested(bias), header=header)),
        ("bias", lambda: fk.packed_linear(x, packed, bias.to_sparse(), header=header)),
    ]:
        with pytest.raises(ValueError, match=rf"^\w+: {name} must be a dense tensor"):
            call()


@pytest.mark.fault("packed file")
@pytest.mark.parametrize("at", [64, 67, 64 + 4 * 25, 64 + 128, 64 + 128 + 5], ids=str)  # row order, padding, offsets
def test_places_that_cannot_be_are_refused_even_with_their_hash(at):
    packed = altered(fk.pack_weight(make_weight(20, 300)), at, 100)
    digest = hashlib.sha256(bytes(packed[64:].tolist())).digest()
    packed[32:64] = torch.tensor(list(digest), dtype=torch.uint8)
    with pytest.raises(ValueError, match="row order or offsets that cannot be"):
        fk.check_packed(packed)


def test_arguments_that_do_not_fit_are_named():
    packed, x = fk.pack_weight(make_weight(20, 300)), torch.ones(2, 300)
    header, other = fk.read_packed_header(packed), fk.read_packed_header(fk.pack_weight(make_weight(16, 300)))
    for call, message in [
        (lambda: fk.packed_linear(x[:, 1:], packed), "x must be [..., 300] float32 on cpu like the packed weight"),
        (lambda: fk.packed_linear(x.half(), packed), "x must be [..., 300] float32"),
        (lambda: fk.packed_linear(x[0], packed), "x must be [..., C]"),
        (lambda: fk.packed_linear(x, packed, torch.ones(3)), "bias must be [20] float32 on cpu, got [3]"),
        (lambda: fk.packed_linear(x, packed, [1]), "bias must be"),
        (lambda: fk.packed_linear(x, None, header=header), "packed must be a torch.Tensor, got None"),
        (lambda: fk.unpack_weight(packed.float(), header), "packed must be [N] uint8 on cpu, got"),
        (lambda: fk.unpack_weight(packed, "header"), "header must be what read_packed_header() returns, got str"),
        (lambda: fk.pack_weight(x, torch.ones(2, 3) > 0), "mask must be [2, 300] bool"),
        (lambda: fk.pack_weight(x.int()), "weight must be [R, C]"),
        (lambda: fk.pack_weight(x.to("meta")), "weight is on the meta device and holds no numbers"),
        (lambda: fk.check_packed(packed.to("meta")), "packed is on the meta device and holds no numbers"),
        (
            lambda: fk.packed_linear(x, packed, header=other),
            f"header is of a packed weight of {other.nbytes} bytes, got",
        ),
        (lambda: fk.unpack_weight(packed, other), "give its own header"),
        (lambda: fk.PackedHeader(None, torch.float32, ""), "shape must be (R, C), two sizes below 2**31, got None"),
        (lambda: fk.PackedHeader((-1, 2), torch.float32, ""), "got (-1, 2)"),
        (lambda: fk.PackedHeader((1, 2), torch.float64, ""), "dtype must be one of"),
    ]:
        with pytest.raises(ValueError) as error:
            call()
        assert message in str(error.value)


def test_a_product_has_no_derivative():
    packed, x = fk.pack_weight(make_weight(20, 300)), torch.ones(2, 300, requires_grad=True)
    with pytest.raises(RuntimeError, match="no derivative"):
        fk.packed_linear(x, packed).sum().backward()
