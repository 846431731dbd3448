"""The CUDA kernels on a machine without a GPU: NVRTC compiles them, and the launches pass what the kernels expect."""

import re
import runpy
from functools import cache

import pytest
import torch
from helpers_cuda import fake_driver, parameter_sizes, resources

import fwanda_kernels as fk
from fwanda_kernels._build import PACKAGE
from fwanda_kernels._obs import RULES, Block, ObsCall
from fwanda_kernels.ops.packed import CHUNK_COLUMNS, TILE_ROWS
from fwanda_kernels.testing import make_keep, make_scale, make_weight

compiling = runpy.run_path(str(PACKAGE / "_backends" / "cuda" / "compile.py"))
try:
    NVRTC = compiling["find_nvrtc"]()
except compiling["CompileError"] as error:
    pytestmark = pytest.mark.skip(reason=str(error))

MODULES = compiling["MODULES"]
# Bytes that a thread of these kernels spills at most, on some architecture and with some NVRTC; all others spill none.
# Row selection of bf16 spills none on Hopper, and at most 8 in wide variants there and on data-center Blackwell (NVRTC
# 13.0; none with 13.5). Elsewhere it is at most 4 of the 210 instructions of a round of
# row selection (unaligned or fp32), and 0.5 % of the loops of the others.
SPILLS = {
    "row_topk": 56,
    "compress_24": 8,
    "threshold_next": 24,
    "threshold_last": 8,
    "obs_walk": 24,
    "packed_linear_16": 24,
    "packed_linear_direct": 8,
}


@pytest.fixture(scope="module")
def backend():
    """The package of the backend, on top of the stand-in for the driver where there is no GPU."""
    if not torch.cuda.is_available():
        fake_driver()
    from fwanda_kernels._backends import cuda
    from fwanda_kernels._backends.cuda import obs, packed, select, sparse24, stats, threshold  # noqa: F401

    return cuda


@pytest.mark.parametrize("arch", [90, 100, 120])
@pytest.mark.parametrize("module", MODULES, ids="-".join)
def test_nvrtc_compiles_every_module_for_every_architecture(module, arch, tmp_path):
    used = resources(NVRTC.compile(*module, arch).code, tmp_path)
    assert used
    family, variant = module
    for kernel, usage in used.items():
        allowed = max([size for name, size in SPILLS.items() if kernel.startswith(name)], default=0)
        rows = variant.rpartition("-")[0] if family == "select" else None
        if (rows == "bf16" and arch == 100) or (rows == "bf16-wide" and arch == 90):
            allowed = 8
        if rows == "bf16" and arch == 90:
            allowed = 0
        # row selection runs up to 1,024 threads in a block, or 896 with fp32 on sm_120 and in wide variants
        roomy = "-wide-" in variant or (variant.startswith("fp32") and arch == 120)
        most = 168 if family != "select" else 72 if roomy else 64
        assert usage["REG"] <= most and usage["LOCAL"] == 0 and usage["STACK"] <= allowed, (kernel, usage)


@cache
def ptx_of(family: str, variant: str) -> str:
    folder = compiling["sources"]()
    options = ["--gpu-architecture=compute_90", *compiling["OPTIONS"]]
    options += [f"-D{macro}" for macro in compiling["FAMILIES"][family][variant]]
    source = (folder / f"{family}.cu").read_bytes()
    return NVRTC.compile_source(f"{family}.cu", source, options, "PTX").decode()


def compile_after(family: str, *lines: str) -> str:
    """PTX of a .cu file with lines of code after it."""
    variant = next(iter(compiling["FAMILIES"][family]))
    options = ["--gpu-architecture=compute_90", *compiling["OPTIONS"], "-w"]
    options += [f"-D{macro}" for macro in compiling["FAMILIES"][family][variant]]
    text = "\n".join([(compiling["sources"]() / f"{family}.cu").read_text(), "using namespace fwanda;", *lines])
    return NVRTC.compile_source(f"{family}.cu", text.encode(), options, "PTX").decode()


def expect(family: str, *claims: str) -> None:
    """Compile a .cu file followed by static assertions."""
    compile_after(family, *[f'static_assert({claim}, "{claim}");' for claim in claims])


def expect_layouts(family: str, *layouts) -> None:
    """Compare sizes and places of members; NVRTC before 13.5 has no offsetof, so a kernel computes them."""
    expected, values = [], []
    for layout in layouts:
        for member, place in layout.offsets().items():
            expected.append((layout.name, member, place))
            values.append(f"(uint64_t)&(({layout.name}*)0)->{member}")
        expected.append((layout.name, "size", layout.size))
        values.append(f"sizeof({layout.name})")
    stores = [f"out[{i}] = {value};" for i, value in enumerate(values)]
    ptx = compile_after(family, 'extern "C" __global__ void places(volatile uint64_t* out) {', *stores, "}")
    body = ptx[ptx.index(".entry places") :]
    constants = dict(re.findall(r"mov\.[bu]64\s+(%rd\d+), (\d+);", body))
    stored = re.findall(r"st\.volatile\.global\.[bu]64\s+\[%rd\d+\+?(\d*)\], (\S+);", body)
    by_place = {int(at or 0) // 8: int(constants.get(value, value)) for at, value in stored}
    assert [(*claim[:2], by_place[i]) for i, claim in enumerate(expected)] == expected


def test_a_wrong_claim_is_found():
    with pytest.raises(compiling["CompileError"], match="kSteps == 15"):
        expect("select", "kSteps == 15")


def test_structs_and_constants_of_row_selection_are_those_of_the_kernel(backend):
    select = backend.select
    claims = [f"list_bytes({t}) == {select.list_bytes(t)}" for t in range(32, 1025, 32)]
    claims += [f"kMaxMatrices == {select.MAX_MATRICES}", f"kColsPerWarp == {select.COLUMNS_PER_WARP}"]
    claims += ["sizeof(Table<2>) == 8 + 2 * sizeof(Entry)", "kMaxCols == 65535"]
    claims += [f"sizeof(Shared) + list_bytes(1024) <= {select.BESIDE_ROW}"]
    expect("select", *claims)
    expect_layouts("select", select.ENTRY)


def test_structs_and_constants_of_sums_are_those_of_the_kernel(backend):
    stats = backend.stats
    claims = [f"slab_tokens({t}) == {stats.slab_tokens(t)}" for t in (1, 128, 4096, 4097, 100000)]
    claims += [f"kMaxEntries == {stats.MAX_ENTRIES}", f"kWarps * 32 == {stats.THREADS}"]
    claims += [f"kStrip == {stats.STRIP}", f"kFinishCols == {stats.FINISH_COLUMNS}"]
    claims += ["int(DType::bf16) == 0 && int(DType::fp16) == 1 && int(DType::fp32) == 2"]
    claims += ["sizeof(Table<2>) == 8 + 2 * sizeof(Entry)"]
    assert list(backend.DTYPES.values()) == ["bf16", "fp16", "fp32"]
    expect("stats", *claims)
    expect_layouts("stats", stats.ENTRY)


def test_structs_and_constants_of_n_of_4_are_those_of_the_kernel(backend):
    sparse24 = backend.sparse24
    claims = [f"kWarps == {sparse24.WARPS}", f"kRows == {sparse24.ROWS}", f"kBandRows == {sparse24.BAND_ROWS}"]
    expect("sparse24", *claims, f"kStrip == {sparse24.STRIP}")
    expect_layouts("sparse24", sparse24.WEIGHT)
    assert sparse24.THREADS == 32 * sparse24.WARPS


def test_structs_and_constants_of_the_threshold_are_those_of_the_kernel(backend):
    threshold = backend.threshold
    claims = [f"kMaxMatrices == {threshold.MAX_MATRICES}", f"kBins == {threshold.BINS}"]
    claims += [f"sizeof(State) == {threshold.STATE_BYTES}", f"kTileRows == {threshold.TILE_ROWS}"]
    claims += [f"kWarps == {threshold.WARPS}", f"kStrip == {threshold.STRIP}", "sizeof(Listed) == 8"]
    claims += [
        f"blocks_per_sm<Bf16>() == {threshold.BLOCKS_PER_SM[2]}",
        "sizeof(Table) == 8 + kMaxMatrices * sizeof(Entry)",
    ]
    claims += [f"blocks_per_sm<Fp32>() == {threshold.BLOCKS_PER_SM[4]}", f"kRanks == {threshold.DIGITS}"]
    expect("threshold", *claims)
    expect_layouts("threshold", threshold.ENTRY, threshold.WORKSPACE, threshold.RANKS)


def test_structs_and_constants_of_obs_are_those_of_the_kernel(backend):
    obs = backend.obs
    claims = [f"kState + 4 == {obs.COUNTERS}", f"kRows == {obs.ROWS}", f"kThreads == {obs.THREADS}"]
    claims += [f"(kObsColumns + 2) * kObsColumns * 4 == {obs.SHARED_BYTES}"]
    claims += [f"int(ObsRule::{rule}) == {i}" for i, rule in enumerate(RULES)]
    expect("obs", *claims)
    expect_layouts("obs", obs.BLOCK)


def test_structs_and_constants_of_packed_weights_are_those_of_the_kernel(backend):
    packed, layout = backend.packed, backend.packed.PACKED
    claims = [f"sizeof(Shared) == {packed.HEAD_BYTES}", f"kMaxWarps >= {packed.WARPS}", f"kTokens == {packed.TOKENS}"]
    claims += [f"kTileRows == {TILE_ROWS}", f"kChunkColumns == {CHUNK_COLUMNS}", f"THREADS >= {32 * packed.WARPS}"]
    claims += [f"sizeof(Sums<2>) == 2 * 4 * {TILE_ROWS * packed.TOKENS}"]
    expect("packed", *claims)
    expect_layouts("packed", layout)
    assert (packed.TILE_ROWS, packed.CHUNK_COLUMNS) == (TILE_ROWS, CHUNK_COLUMNS)
    assert packed.LARGEST_CHUNK == 16 * TILE_ROWS * CHUNK_COLUMNS // 128 + 2 * TILE_ROWS * CHUNK_COLUMNS


SHAPES = [(1, 8), (16, 100_000), (4096, 4096), (11008, 4096), (4096, 11008), (128_256, 4096), (1024, 8192)]


@pytest.mark.parametrize("shared", [232_448, 101_376])
@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_divisions_of_products_fit_the_card(backend, rows, columns, tokens, shared):
    packed = backend.packed
    division = packed.divide(rows, columns, tokens, 132, shared)
    chunks = -(-columns // CHUNK_COLUMNS)
    groups = 1 if tokens <= packed.TOKENS and not division.direct else 2
    sums = 4 * TILE_ROWS * packed.TOKENS * groups * (division.tiles + division.warps)
    token = 2 * CHUNK_COLUMNS * -(-chunks // division.cluster) + 64  # bytes of x
    copies = 4 * TILE_ROWS * division.tiles + tokens * token * (not division.direct)
    buffers = division.warps * division.buffer
    assert division.buffer >= packed.LARGEST_CHUNK and division.buffer % 128 == 0
    assert packed.HEAD_BYTES + copies + sums + 127 + buffers + packed.OVERRUN <= division.shared <= shared
    assert division.cluster <= min(2, chunks) and division.warps >= 3
    assert division.warps <= 12 or not division.direct or shared > 101_376  # kDirectThreads


def test_one_wave_of_blocks_serves_common_shapes(backend):
    for rows, columns in SHAPES[2:5]:
        division = backend.packed.divide(rows, columns, 1, 132, 232_448)
        blocks = -(-rows // (TILE_ROWS * division.tiles)) * division.cluster
        assert 0.85 * 132 <= blocks <= 132


@pytest.mark.parametrize(
    "rows, columns, tokens, expected",
    [
        (4096, 4096, 1, (2, 1, 16, False)),
        (4096, 4096, 8, (2, 1, 16, False)),
        (4096, 4096, 16, (4, 2, 16, False)),
        (11008, 4096, 1, (11, 2, 16, False)),
        (11008, 4096, 8, (6, 1, 16, False)),
        (11008, 4096, 16, (11, 2, 15, False)),
        (4096, 11008, 1, (2, 1, 16, False)),
        (4096, 11008, 8, (4, 2, 15, False)),
        (4096, 11008, 16, (2, 1, 16, True)),
    ],
)
def test_products_are_divided_as_was_fastest_on_an_h200(backend, rows, columns, tokens, expected):
    division = backend.packed.divide(rows, columns, tokens, 132, 232_448)
    assert (division.tiles, division.cluster, division.warps, division.direct) == expected


# launches


def plans(backend) -> dict[str, list]:
    """Launches of each op on small arguments, aligned and not, of one matrix and of several."""
    weight, narrow = make_weight(64, 256, torch.bfloat16), make_weight(64, 256, torch.float32)[:, 1:253]
    small = make_weight(5, 3000, torch.bfloat16)
    weights = [weight, small, weight.clone()]
    scales, keeps = [make_scale(w.shape[1]) for w in weights], [make_keep(*w.shape) for w in weights]
    bad, mask = torch.zeros(3, dtype=torch.int32), torch.empty(64, 256, dtype=torch.bool)
    tokens = torch.ones(64, dtype=torch.bool)
    accs, scratch = [torch.zeros(w.shape[1]) for w in (weight, narrow)], torch.empty(4096)
    bits = fk.pack_weight(weight)
    values, meta = torch.empty(64, 128, dtype=torch.bfloat16), torch.empty(64, 16, dtype=torch.int16)
    select, stats, sparse24 = backend.select, backend.stats, backend.sparse24
    few, more = (backend.packed.divide(64, 256, tokens, 132, 232_448) for tokens in (3, 9))
    direct = backend.packed.fit(1, 1, 256, 9, 232_448, direct=True)
    return {
        "mask": select.plan_one(weight, (64, 256, 256), scales[0], keeps[0], bad, mask),
        "prune": select.plan_one(weight, (64, 256, 256), scales[0], keeps[0], bad, None),
        "prune list": select.plan_list(weights, sizes_of(weights), scales, keeps, bad),
        "prune unaligned": select.plan_one(narrow, (64, 252, 256), scales[0][1:253], keeps[0], bad, None),
        "sums": stats.plan(accs[:1], [weight], None, scratch),
        "sums of a list": stats.plan(accs, [weight, narrow], None, scratch),
        "masked sums": stats.plan(accs[:1], [weight], tokens, scratch),
        "masked sums of a list": stats.plan(accs, [weight, narrow], tokens, scratch),
        "keep": sparse24.plan_keep(weight, scales[0], 2, bad, None),
        "keep mask": sparse24.plan_keep(narrow, scales[0][1:253], 1, bad, mask),
        "compress": sparse24.plan_compress(weight, scales[0], bad, values, meta),
        "threshold": threshold_plan(backend, [weight, narrow], 1000),
        "unpack": backend.packed.plan_unpack(bits, 64, 256, weight),
        "linear": backend.packed.plan_linear(weight[:3], bits, None, weight[:3, :64], few),
        "linear of 9 tokens": backend.packed.plan_linear(weight[:9], bits, scales[0], weight[:9, :64], more),
        "linear without a copy": backend.packed.plan_linear(weight[:9], bits, None, weight[:9, :64], direct),
        **{f"obs {rule}": obs_plan(backend, weight, rule) for rule in RULES},
    }


def sizes_of(weights: list) -> list[tuple[int, int, int]]:
    """(rows, columns, row stride) of each, as the backend finds them for tensors on a GPU."""
    return [(*weight.shape, weight.stride(0)) for weight in weights]


def threshold_plan(backend, weights: list, total: int) -> list:
    threshold = backend.threshold
    rows, cols = ([make_scale(w.shape[i]) for w in weights] for i in (0, 1))
    counts = [torch.empty(sum(w.shape[0] for w in weights), dtype=torch.int32) for _ in range(2)]
    bad, sizes = torch.zeros(1, dtype=torch.int32), sizes_of(weights)
    search = threshold.Search(weights, sizes, rows, cols, total, *counts, bad)
    return list(search.plan(132))


def obs_plan(backend, weight: torch.Tensor, rule: str) -> list:
    chosen = {"keep": make_keep(*weight.shape), "mask": (weight > 0).view(torch.uint8)}.get(rule)
    cols, work = weight.shape[1], weight.float()
    call = ObsCall(weight, torch.eye(cols), None, rule, chosen, 4, [Block(0, 128, 5)])
    counts = torch.zeros(backend.obs.COUNTERS, dtype=torch.int32)
    return backend.obs.plan(call, work, torch.ones(cols), call.blocks[0], torch.empty(128, len(weight)), counts)


def test_every_launch_passes_parameters_of_the_kernel_s_sizes(backend):
    ptx = {}
    for name, steps in plans(backend).items():
        launches = [step for step in steps if isinstance(step, backend.Launch)]
        assert launches, name
        for launch in launches:
            assert launch.module in MODULES, name
            if launch.module not in ptx:
                ptx[launch.module] = parameter_sizes(ptx_of(*launch.module))
            sizes = ptx[launch.module][launch.kernel]
            assert [len(parameter) for parameter in launch.parameters] == sizes, (name, launch.kernel)
            assert launch.blocks > 0 and launch.threads % 32 == 0 and launch.threads <= 1024


def test_every_kernel_is_launched_by_some_op(backend):
    launched = {s.kernel for steps in plans(backend).values() for s in steps if isinstance(s, backend.Launch)}
    compiled = {kernel for module in MODULES for kernel in parameter_sizes(ptx_of(*module))}
    assert compiled == launched


def entries(layout, table: bytes, count: int, head: int = 8) -> list[dict]:
    names = [name for _, name in layout.members]
    return [dict(zip(names, layout.unpack_from(table, head + i * layout.size), strict=True)) for i in range(count)]


def test_a_list_of_rows_takes_a_launch_for_each_number_of_threads(backend):
    select = backend.select
    weights = [make_weight(r, c, torch.bfloat16) for r, c in ((3, 64), (2, 6000), (4, 2048), (1, 2056), (0, 64))]
    scales, keeps = [make_scale(w.shape[1]) for w in weights], [make_keep(*w.shape) for w in weights]
    bad = torch.zeros(5, dtype=torch.int32)
    wide, middle, narrow = select.plan_list(weights, sizes_of(weights), scales, keeps, bad)
    assert (wide.kernel, wide.blocks, wide.threads, wide.shared) == ("row_topk_prune", 2, 96, 512 + 12000)
    assert (middle.kernel, middle.blocks, middle.threads) == ("row_topk_prune", 1, 64)
    assert (narrow.kernel, narrow.blocks, narrow.threads) == ("row_topk_prune_list", 7, 32)
    assert len(narrow.parameters[0]) == 8 + 64 * 448 and narrow.parameters[0][:4] == (2).to_bytes(4, "little")
    first, second = entries(select.ENTRY, narrow.parameters[0], 2)
    assert [first["first_row"], second["first_row"]] == [0, 3]
    assert second["m.weight"] == weights[2].data_ptr() and second["m.bad"] == bad.data_ptr() + 8
    assert second["m.scale"] == scales[2].data_ptr() and second["m.keep"] == keeps[2].data_ptr()
    assert second["m.row_stride"] == 2048 and (second["m.rows"], second["m.cols"]) == (4, 2048)


@pytest.mark.parametrize(
    "dtype, cols, variant, threads",
    [
        (torch.bfloat16, 5120, "bf16-wide", 64),
        (torch.float16, 4104, "fp16-wide", 64),
        (torch.bfloat16, 4096, "bf16", 64),
        (torch.bfloat16, 5128, "bf16", 96),
        (torch.bfloat16, 5119, "bf16-unaligned", 96),
        (torch.float32, 5120, "fp32", 96),
    ],
)
def test_rows_that_two_warps_can_take_alone_use_a_wide_variant(backend, dtype, cols, variant, threads):
    select, weight, other = backend.select, make_weight(2, cols, dtype), make_weight(3, 4096, dtype)
    scales, keeps = [make_scale(cols), make_scale(4096)], [make_keep(2, cols), make_keep(3, 4096)]
    bad = torch.zeros(2, dtype=torch.int32)
    (one,) = select.plan_one(weight, (2, cols, cols), scales[0], keeps[0], bad, None)
    assert (one.module, one.threads, one.blocks) == (("select", f"{variant}-prune"), threads, 2)
    weights = [other, weight]
    launches = select.plan_list(weights, sizes_of(weights), scales[::-1], keeps[::-1], bad)
    assert sum(launch.blocks for launch in launches) == 5
    if cols != 4096:
        modules = [f"{variant}-prune", f"{variant.removesuffix('-wide')}-prune"]
        assert [(x.module[1], x.threads) for x in launches] == [(modules[0], threads), (modules[1], 64)]


def test_more_matrices_than_a_table_holds_take_several_launches(backend):
    weight, scale = make_weight(2, 32, torch.float16), make_scale(32)
    keep, bad = make_keep(2, 32), torch.zeros(500, dtype=torch.int32)
    first, second = backend.select.plan_list([weight] * 500, [(2, 32, 32)] * 500, [scale] * 500, [keep] * 500, bad)
    assert (first.blocks, second.blocks) == (896, 104)
    assert entries(backend.select.ENTRY, second.parameters[0], 1)[0]["first_row"] == 0


def test_sums_of_a_list_lie_side_by_side_in_the_scratch_memory(backend):
    stats = backend.stats
    xs = [torch.ones(300, 40), torch.ones(5000, 7)[:, :6], *[torch.ones(1, 8)] * 63]
    accs, scratch = [torch.zeros(x.shape[1]) for x in xs], torch.empty(100000)
    sums, finish, last, _ = stats.plan(accs, xs, None, scratch)
    first, second, third = entries(stats.ENTRY, sums.parameters[0], 3)
    start = scratch.data_ptr()
    assert [e["partial"] - start for e in (first, second, third)] == [0, 4 * 3 * 40, 4 * (3 * 40 + 20 * 6)]
    assert [e["first_block"] for e in (first, second, third)] == [0, 3, 23] and sums.blocks == 23 + 62
    assert [e["first_finish"] for e in (first, second, third)] == [0, 2, 3] and finish.blocks == 3 + 62
    assert [e["aligned"] for e in (first, second)] == [True, False] and finish.early and not sums.early
    rest = entries(stats.ENTRY, last.parameters[0], 1)[0]
    assert rest["partial"] - start == 4 * (120 + 120 + 62 * 8) and rest["first_block"] == 0


def test_a_threshold_takes_a_table_for_each_dtype_and_shares_its_workspace(backend):
    weights = [
        make_weight(64, 256, torch.bfloat16),
        make_weight(9, 8, torch.float32),
        make_weight(8, 7, torch.bfloat16),
    ]
    zero, *launches = threshold_plan(backend, weights, 50)
    threshold = backend.threshold
    assert {launch.module[1] for launch in launches} == {"bf16", "fp32", "bf16-unaligned"}
    scales = threshold.WORKSPACE.unpack(launches[1].parameters[1])[3]
    assert zero.address + zero.size == scales
    passes = [launch for launch in launches if launch.kernel == "threshold_first"]
    found = [entries(threshold.ENTRY, launch.parameters[0], 1)[0] for launch in passes]
    assert [e["m.weight"] for e in found] == [w.data_ptr() for w in weights]
    assert [e["first_row"] for e in found] == [0, 64, 73] and [e["first_tile"] for e in found] == [0, 0, 0]
    assert [e["first_element"] for e in found] == [0, 64 * 256, 64 * 256 + 72]
    assert [e["padded"] - scales for e in found] == [0, 1024, 2048]
    assert (
        len({launch.parameters[2] for launch in launches if "_first" in launch.kernel or "_next" in launch.kernel}) == 9
    )
