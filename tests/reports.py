"""Records of runs as they are written, for the tests of what is made of them."""

from fwanda_pruner.report.record import ROW_BINS, MatrixRow, Report

KINDS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
SEARCH = {
    "name": "round 2",
    "start": "global b=1 c=0.5",
    "losses": {
        "dense": {"c4": 3.0, "code": 2.0},
        "wanda": {"c4": 4.0, "code": 2.5},
        "global b=1 c=0.5": {"c4": 3.5, "code": 2.5},
        "round 2": {"c4": 3.25, "code": 2.25},
        "round 4": {"c4": 3.5},  # the other loss is not finite
    },
}
ENERGY = {"gross_joules": 5000.0, "net_joules": 4000.0, "flag": None}


PROTOCOL = {
    "source": "text.txt", "seqlen": 64, "windows": 3, "tokens_sha256": "ab" * 32, "bos": True, "tokenizer": "tiny",
}  # fmt: skip


def domain(source: str, dense=2.0, wanda=2.5, pruned=2.25, **changes) -> dict:
    facts = {"source": source, "calibrated": False, "unread": True, "windows": 8}
    return facts | {"dense": dense, "wanda": wanda, "pruned": pruned} | changes


def perplexity(source: str, dense=20.0, pruned=30.0, **changes) -> dict:
    return PROTOCOL | {"source": source, "dense": dense, "pruned": pruned} | changes


def matrices(blocks: int = 4) -> list[MatrixRow]:
    """Four matrices [4, 10] in each block; matrix k of block b keeps 10 + b + k of its 40 weights."""
    return [
        MatrixRow(f"model.layers.{b}.{kind}", (4, 10), 10 + b + k, 10 + b + k, 0, wanda_disagreement=0.05 * (k + 1))
        for b in range(blocks)
        for k, kind in enumerate(KINDS)
    ]


def make_report(**changes) -> Report:
    """A small record of Wanda, as a CPU measured it."""
    facts = dict(
        config={"method": "wanda", "allocation": "uniform", "sparsity": 0.5},
        matrices=[
            MatrixRow("a", (4, 10), asked=20, kept=20, kept_zero=2, wanda_disagreement=0.25),
            MatrixRow("b", (2, 10), asked=15, kept=15, kept_zero=0),
            MatrixRow("head", (5, 10), asked=50, kept=50, kept_zero=1, skipped="tied"),
        ],
        block_parameters=150,
        model_parameters=200,
        model_zeros=30,
        perplexity=[{"dense": 20.5, "pruned": 35.25, **PROTOCOL}],
        seconds={"calibrate": 1.5, "prune": 2.0},
        peak_memory_bytes=2**30,
        energy="not measured: device is cpu",
        energy_details={"total": "not measured: device is cpu", "phases": {}},
        versions={"torch": "2"},
        tokens_sha256="cd" * 32,
        bos=True,
        warnings=["nsamples is small"],
        omega_floored_rows=7,
        domains=[],
        passes={"micro_batch": 2, "compiled": False, "checkpointing": False, "compile_seconds": 0.0},
        row_histogram=[0, 6, *[0] * (ROW_BINS - 2)],
    )
    return Report(**{**facts, **changes})


def compared() -> Report:
    """make_report() with a comparison on three domains."""
    return make_report(
        domains=[
            domain("c4", calibrated=True),
            domain("tokens", calibrated=True, unread=False),
            domain("code", 0.5, None, 1.125, windows=6),
        ],
        refit={"blocks": 4, "kept": 3},
    )


def record(**changes) -> Report:
    """The record of a run of F-Wanda with a search, as a GPU measured it."""
    rows = changes.pop("matrices", matrices())
    facts = dict(
        config={
            "model": "org/model-7b", "method": "fwanda", "allocation": "auto", "sparsity": "0.7", "pattern": None,
            "calibration": ["c4"], "nsamples": 16, "seqlen": 64, "seed": 0, "chosen": SEARCH,
        },
        matrices=[*rows, MatrixRow("lm_head", (5, 10), 50, 50, 1, skipped="tied")],
        block_parameters=640,
        model_parameters=1000,
        model_zeros=472,
        perplexity=[perplexity("wikitext2"), perplexity("code", 6.0, 7.5)],
        seconds={"load": 3.0, "calibrate": 10.0, "choose": 20.5, "prune": 2.0},
        peak_memory_bytes=2**31,
        energy=5000.0,
        energy_details={"total": ENERGY, "phases": {"calibrate": ENERGY | {"gross_joules": 1234.0}, "prune": "not resolved"}},  # noqa: E501
        versions={"torch": "2.13", "triton": None, "device": "a GPU"},
        tokens_sha256="cd" * 32,
        bos=True,
        warnings=["nsamples is small"],
        omega_floored_rows=7,
        domains=[domain("c4", calibrated=True), domain("code", wanda=None, pruned=None)],
        passes={"micro_batch": 2, "compiled": False, "checkpointing": False, "compile_seconds": 0.0},
        refit={"blocks": 4, "kept": 3},
        row_histogram=[0] * 10 + [2, 6, 8] + [0] * (ROW_BINS - 13),
        backends={"row_topk_mask": "cuda", "obs_prune_": "triton", "nm_mask": "cuda"},
    )  # fmt: skip
    return Report(**{**facts, **changes})
