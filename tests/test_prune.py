"""prune(): every method and allocation removes exactly what was asked, and the report says what the files hold."""

import json
import threading
import warnings
from fractions import Fraction

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer

import fwanda_kernels as fk
import fwanda_pruner
from fwanda_pruner import PruneConfig, UserError
from fwanda_pruner.engine.device import device_rules
from fwanda_pruner.formats.audit import audit
from fwanda_pruner.methods_table import METHODS
from fwanda_pruner.model.targets import find_targets

TOKENS = tiny.tokens(5, 24)


def prune(model, **settings):
    return fwanda_pruner.prune(model, calibration=TOKENS, progress=False, **settings)


def zeros(model):
    return {t.name: int((t.weight == 0).sum()) for t in find_targets(model)[0]}


@pytest.mark.fault("denominators")
@pytest.mark.parametrize(("method", "allocation", "order"), tiny.EVERY_RUN)
@pytest.mark.parametrize("sparsity", ["0.5", "0.7"])
def test_counts_and_the_denominators_of_sparsity_are_exact(method, allocation, sparsity, order):
    model = tiny.llama()
    embedding = model.model.embed_tokens.weight.clone()
    report = prune(model, method=method, allocation=allocation, sparsity=sparsity, order=order)
    found = zeros(model)
    if allocation == "auto":
        allocation = report.config["chosen"]["name"].split()[0]  # "round" of the response
    share, total, removed, whole_model = Fraction(sparsity), 0, 0, ("global", "response", "round")
    for row in report.matrices:
        rows, cols = row.shape
        assert found[row.name] == rows * cols - row.kept + row.kept_zero
        assert row.kept_zero == 0 and row.asked == row.kept
        if allocation == "uniform" and METHODS[method].scores_inputs:
            assert row.kept == rows * (cols - int(share * cols))
        elif allocation not in whole_model:
            assert row.kept == rows * cols - int(share * rows * cols)
        total, removed = total + rows * cols, removed + rows * cols - row.kept
    if allocation in whole_model:
        assert removed == int(share * total)
    assert len(report.matrices) == 14
    assert torch.equal(embedding, model.model.embed_tokens.weight)
    assert report.sparsity["matrices"] == removed / total
    assert report.sparsity["model"] == removed / sum(p.numel() for p in model.parameters())


@pytest.mark.fault("n:m meaning")
@pytest.mark.parametrize(("method", "order"), sorted({(m, o) for m, _, o in tiny.EVERY_RUN}))
@pytest.mark.parametrize("pattern", ["2:4", "4:8", "1:4"])
def test_every_group_of_a_pattern_keeps_n(method, pattern, order):
    model = tiny.llama()
    report = prune(model, method=method, pattern=pattern, order=order)
    n, m = map(int, pattern.split(":"))
    for target in find_targets(model)[0]:
        rows, cols = target.weight.shape
        assert ((target.weight != 0).reshape(rows, cols // m, m).sum(2) == n).all(), target.name
    assert report.sparsity["asked"] == report.sparsity["matrices"] == 1 - n / m


def test_fwanda_is_wanda_under_a_pattern_and_says_so():
    fisher, plain = tiny.llama(), tiny.llama()
    message = "row budgets have no effect inside an n:m group, so fwanda with 2:4 equals wanda with 2:4"
    with pytest.warns(UserWarning, match=message):
        report = prune(fisher, method="fwanda", pattern="2:4")
    prune(plain, method="wanda", pattern="2:4")
    assert all(torch.equal(a, b) for a, b in zip(fisher.parameters(), plain.parameters(), strict=True))
    assert any(line.startswith(message) for line in report.warnings)


@pytest.mark.parametrize(
    ("method", "allocation"),
    [
        ("fwanda", "global"),
        ("magnitude", "layer"),
        ("wanda", "uniform"),
        ("sparsegpt", "uniform"),
        ("fsparsegpt", "uniform"),
    ],
)
def test_the_allocation_of_a_method_that_names_none(method, allocation):
    default, named = tiny.llama(), tiny.llama()
    report = prune(default, method=method, sparsity="0.6")
    prune(named, method=method, allocation=allocation, sparsity="0.6")
    assert report.config["allocation"] == allocation
    assert all(torch.equal(a, b) for a, b in zip(default.parameters(), named.parameters(), strict=True))


@pytest.mark.fault("column tail")
@pytest.mark.parametrize("method", ["wanda", "magnitude", "sparsegpt"])
def test_columns_that_are_no_multiple_of_m_are_an_error_or_an_exact_count(method):
    model = tiny.llama(intermediate_size=46)
    dense = {t.name: t.weight.clone() for t in find_targets(model)[0]}
    with pytest.raises(UserError, match="down_proj has 46 columns, pattern 2:4 needs a multiple of 4"):
        prune(tiny.llama(intermediate_size=46), method=method, pattern="2:4")
    report = prune(model, method=method, pattern="2:4", nm_tail="dense")
    for row, target in zip(report.matrices, find_targets(model)[0], strict=True):
        rows, cols = row.shape
        assert row.asked == rows * (cols // 4 * 2 + cols % 4)
        assert int((target.weight == 0).sum()) == rows * cols - row.asked
        if cols % 4 and method != "sparsegpt":
            assert torch.equal(target.weight[:, -2:], dense[target.name][:, -2:])


def idle_experts(model):
    """Two linear layers of different shape in the first block that no token reaches."""
    model.model.layers[0].up = torch.nn.Linear(32, 40, bias=False)
    model.model.layers[0].down = torch.nn.Linear(40, 32, bias=False)
    return model


@pytest.mark.fault("unrouted expert")
@pytest.mark.parametrize(("method", "allocation", "order"), tiny.EVERY_RUN)
def test_a_matrix_without_tokens_is_pruned_by_magnitude_and_named(method, allocation, order):
    model = idle_experts(tiny.llama())
    weight = model.model.layers[0].up.weight.detach().clone()
    report = prune(model, method=method, allocation=allocation, order=order, sparsity=0.5)
    found = model.model.layers[0].up.weight
    assert int((found == 0).sum()) == weight.numel() // 2
    assert weight[found == 0].abs().max() < weight[found != 0].abs().quantile(0.8)
    said = [line for line in report.warnings if "saw no calibration token" in line]
    assert len(said) == (method != "magnitude") and all("layers.0.up" in line for line in said)


@pytest.mark.parametrize(
    ("method", "order"), [("wanda", "sequential"), ("sparsegpt", "sequential"), ("fwanda", "onepass")]
)
def test_a_block_without_targets_is_passed_through(method, order):
    model = tiny.llama(blocks=3)
    for module in [m for m in model.model.layers[1].modules() if isinstance(m, torch.nn.Linear)]:
        module.__class__ = type("OtherLinear", (torch.nn.Module,), {"forward": torch.nn.Linear.forward})
    report = prune(model, method=method, order=order)
    pruned = {row.name.split(".")[2] for row in report.matrices if row.skipped is None}
    assert pruned == {"0", "2"} and sum(row.skipped is not None for row in report.matrices) == 7


def test_a_matrix_that_is_no_linear_layer_is_listed_as_left_dense():
    model = tiny.llama()
    model.model.layers[1].experts = torch.nn.Module()
    model.model.layers[1].experts.fused = torch.nn.Parameter(torch.ones(2, 3, 4))
    row = next(r for r in prune(model, method="wanda").to_dict()["matrices"] if r["skipped"])
    assert row["name"] == "model.layers.1.experts.fused" and row["shape"] == [2, 3, 4]
    assert row["sparsity"] == 0 and row["kept"] == 24 and "not a linear layer" in row["skipped"]


def test_the_report_names_the_text_that_was_used():
    config = prune(tiny.llama(), method="wanda", eval=tiny.tokens(3, 16)).config
    assert (config["calibration"], config["nsamples"], config["seqlen"]) == (["tokens"], 5, 24)
    assert config["eval"] == ["tokens"]


def test_several_texts_are_measured_each_by_itself(tmp_path):
    text, ids = tmp_path / "text.txt", [tiny.tokens(3, 16, seed=9), tiny.tokens(2, 20, seed=8)]
    text.write_text(tiny.text(800))
    settings = {"method": "wanda", "calibration": TOKENS, "eval_seqlen": 24, "bos": "none", "progress": False}

    def measured(eval):
        return fwanda_pruner.prune(tiny.llama(), tiny.tokenizer(), eval=eval, **settings)

    report = measured([ids[0], str(text), ids[1]])
    assert report.config["eval"] == ["tokens", str(text), "tokens 2"]
    assert [(t["source"], t["windows"], t["seqlen"]) for t in report.perplexity] == [
        ("tokens", 3, 16), (str(text), 800 // 24, 24), ("tokens 2", 2, 20),
    ]  # fmt: skip
    alone = [measured(eval).perplexity[0] for eval in (ids[0], str(text), [ids[1]])]
    assert report.perplexity == [alone[0], alone[1], {**alone[2], "source": "tokens 2"}]
    assert len({t["pruned"] for t in report.perplexity}) == 3


@pytest.mark.parametrize("eval", ["sample", ["sample"], ("sample",)])
def test_one_text_or_a_list_of_texts_are_settings(eval):
    assert PruneConfig(eval=eval) == PruneConfig.from_dict({"eval": eval}) == PruneConfig(eval=("sample",))
    assert PruneConfig(eval=eval).to_dict()["eval"] == ["sample"]


@pytest.mark.parametrize("eval", [["code", "sample", "code"], 3, [3], None, [tiny.tokens(2, 8).flatten()]])
def test_texts_that_cannot_be_settings_are_one_line(eval):
    with pytest.raises(UserError, match="eval.* (twice|got)") as error:
        prune(tiny.llama(), method="wanda", **({"config": PruneConfig(eval=None)} if eval is None else {"eval": eval}))
    assert "\n" not in str(error.value)


@pytest.mark.fault("statistics file")
@pytest.mark.parametrize("settings", [{"method": "wanda"}, {"method": "fwanda", "allocation": "global"}])
def test_saved_statistics_give_the_same_masks(settings, tmp_path):
    direct, later = tiny.llama(), tiny.llama()
    prune(direct, sparsity=0.6, **settings)
    statistics = fwanda_pruner.collect(later, config=PruneConfig(), calibration=TOKENS, progress=False)
    statistics.save(tmp_path / "s.safetensors")
    loaded = fwanda_pruner.Statistics.load(tmp_path / "s.safetensors")
    report = fwanda_pruner.prune(later, statistics=loaded, sparsity=0.6, progress=False, **settings)
    assert all(torch.equal(a, b) for a, b in zip(direct.parameters(), later.parameters(), strict=True))
    assert report.tokens_sha256 == loaded.tokens_sha256 is not None


def test_text_settings_that_statistics_make_void_are_said():
    statistics = fwanda_pruner.collect(tiny.llama(), config=PruneConfig(), calibration=TOKENS, progress=False)
    asked = {"statistics": statistics, "method": "wanda", "progress": False, "no_check": True}
    assert fwanda_pruner.prune(tiny.llama(), nsamples=5, **asked).warnings == []
    report = fwanda_pruner.prune(tiny.llama(), nsamples=8, **asked)
    assert report.warnings == ["--nsamples 8 has no effect: the statistics are of --nsamples 5"]
    assert report.config["nsamples"] == 5
    report = fwanda_pruner.prune(tiny.llama(), calibration=["a", "b"], **asked)
    assert report.warnings == ["--calibration a, b has no effect: the statistics are of --calibration tokens"]


def test_statistics_are_not_recorded_as_of_the_text_that_is_named_beside_them(tmp_path):
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for seed, path in enumerate(texts):
        path.write_text(tiny.text(800, seed))
    measured, named = map(str, texts)
    settings = {"config": PruneConfig(nsamples=16, seqlen=24, guard="none"), "progress": False}
    statistics = fwanda_pruner.collect(tiny.llama(), tiny.tokenizer(), calibration=measured, **settings)
    report = fwanda_pruner.prune(tiny.llama(), tiny.tokenizer(), statistics=statistics, calibration=named, **settings)
    assert report.config["calibration"] == [measured] == [domain["source"] for domain in report.domains]
    assert f"--calibration {named} has no effect: the statistics are of --calibration {measured}" in report.warnings


def test_prune_works_under_no_grad():
    with torch.no_grad():
        assert prune(tiny.llama(), method="fwanda", allocation="global").sparsity["matrices"] == pytest.approx(
            0.5, abs=1e-4
        )


def test_weights_that_were_zero_count_as_kept_zero():
    model = tiny.llama()
    weight = model.model.layers[0].mlp.up_proj.weight.data
    weight[:, :20] = 0
    report = prune(model, method="wanda", sparsity=0.5)
    row = next(r for r in report.matrices if r.name == "model.layers.0.mlp.up_proj")
    assert row.kept == weight.numel() // 2 and row.kept_zero == 4 * weight.shape[0]
    assert int((weight == 0).sum()) == weight.numel() - row.kept + row.kept_zero


def test_a_dead_input_and_fewer_tokens_than_columns_still_prune():
    model = tiny.llama()
    model.model.embed_tokens.weight.data[:, 7] = 0
    model.model.layers[0].input_layernorm.weight.data[7] = 0
    report = fwanda_pruner.prune(model, method="sparsegpt", sparsity=0.5, calibration=tiny.tokens(1, 8), progress=False)
    assert all(row.kept == row.shape[0] * row.shape[1] // 2 for row in report.matrices)
    assert torch.isfinite(model(TOKENS[:1]).logits).all()


@pytest.mark.fault("protocol")
def test_perplexity_of_dense_and_pruned_with_its_protocol():
    model = tiny.llama()
    tokens = tiny.tokens(3, 16, seed=9)
    report = fwanda_pruner.prune(model, method="wanda", sparsity=0.9, calibration=TOKENS, eval=tokens, progress=False)
    (facts,) = report.to_dict()["perplexity"]
    assert (facts["seqlen"], facts["windows"]) == (16, 3)
    with torch.no_grad():
        logits = model(tokens).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert facts["pruned"] == pytest.approx(float(loss.exp()), rel=1e-5)
    assert facts["dense"] != facts["pruned"]


def test_the_report_has_the_stable_keys_and_is_json(tmp_path):
    model, tokenizer = tiny.llama(), tiny.tokenizer()
    text = tmp_path / "text.txt"
    text.write_text(tiny.text(800))
    report = fwanda_pruner.prune(
        model, tokenizer, method="fwanda", calibration=str(text), eval=str(text), nsamples=16, seqlen=24, progress=False
    )
    facts = json.loads(json.dumps(report.to_dict()))
    assert {
        "perplexity",
        "sparsity",
        "matrices",
        "seconds",
        "peak_memory_bytes",
        "energy",
        "versions",
        "config",
    } <= set(facts)
    assert set(facts["sparsity"]) == {"asked", "matrices", "model"}
    assert list(facts["perplexity"][0]) == [
        "source", "dense", "pruned", "seqlen", "windows", "tokens_sha256", "bos", "tokenizer",
    ]  # fmt: skip
    row = {"name", "shape", "asked", "kept", "kept_zero", "skipped", "wanda_disagreement"}
    assert row <= set(facts["matrices"][0]) and len(facts["row_histogram"]) == 50
    assert facts["energy"].startswith("not measured") and facts["peak_memory_bytes"] > 0
    assert facts["config"]["allocation"] == "global" and facts["config"]["power"] == 0.5
    assert len(facts["tokens_sha256"]) == 64 and isinstance(facts["bos"], bool)
    assert set(facts["seconds"]) == {"text", "eval_dense", "calibrate", "budgets", "check", "prune", "eval_pruned"}


@pytest.mark.fault("reload")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_reloaded_model_gives_equal_logits_and_the_reported_zeros(tmp_path, dtype, tied):
    model, tokenizer = tiny.llama(dtype=dtype, tie_word_embeddings=tied), tiny.tokenizer()
    report = prune(model, method="sparsegpt", sparsity=0.5)
    fwanda_pruner.save_pruned(model, tokenizer, report, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == dtype
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w5 w9").input_ids == tokenizer("w5 w9").input_ids
    counts = audit(tmp_path / "out", [row.name for row in report.matrices])
    assert all(counts[r.name][0] == r.numel - r.kept + r.kept_zero for r in report.matrices)


@pytest.mark.fault("repeatable")
@pytest.mark.parametrize(("method", "allocation"), sorted({(m, a) for m, a, _ in tiny.EVERY_RUN}))
def test_two_runs_give_the_same_bits(method, allocation):
    first, second = tiny.llama(), tiny.llama()
    for model in (first, second):
        prune(model, method=method, allocation=allocation, sparsity=0.5)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_the_model_keeps_its_mode_and_flags():
    model = tiny.llama().train()
    prune(model, method="fwanda", allocation="global")
    assert model.training and all(p.requires_grad and p.grad is None for p in model.parameters())


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns inside the block."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


@pytest.mark.fault("position buffer")
@pytest.mark.parametrize("method", ["wanda", "fwanda", "sparsegpt"])
def test_memory_does_not_follow_max_position_embeddings(method):
    model = tiny.llama()
    assert model.config.max_position_embeddings == 131072
    with LargestTensor() as seen:
        prune(model, method=method)
    assert 0 < seen.largest < 131072


@pytest.mark.fault("nsamples")
@pytest.mark.parametrize("nsamples", [1, 7, 300])
@pytest.mark.parametrize("method", ["wanda", "fwanda", "sparsegpt"])
def test_1_7_and_300_samples_all_work(method, nsamples):
    report = fwanda_pruner.prune(
        tiny.llama(blocks=1), method=method, calibration=tiny.tokens(nsamples, 8), progress=False
    )
    assert report.sparsity["matrices"] == 0.5 and report.config["nsamples"] == nsamples


@pytest.mark.fault("repeatable")
def test_deterministic_holds_during_the_run_and_not_after(monkeypatch):
    """While windows run, and while weights are removed."""
    model, plain, seen = tiny.llama(), fk.foreach_row_topk_prune_, {}

    def look(where):
        seen.setdefault(where, set()).add(torch.are_deterministic_algorithms_enabled())

    def prune_and_look(*args, **arguments):
        look("removed")
        return plain(*args, **arguments)

    monkeypatch.setattr(fk, "foreach_row_topk_prune_", prune_and_look)
    model.model.layers[0].register_forward_hook(lambda *_: look("run"))
    settings = {"calibration": tiny.tokens(16, 24), "progress": False}
    fwanda_pruner.prune(model, deterministic=True, **settings)
    assert seen == {"run": {True}, "removed": {True}}
    seen.clear()
    fwanda_pruner.prune(model, **settings)
    assert seen == {"run": {False}, "removed": {False}} and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.fault("repeatable")
def test_an_operation_without_a_deterministic_form_is_one_line():
    model = tiny.llama()

    def refuse(*_):
        raise RuntimeError("put_ does not have a deterministic implementation,\nbut you set ...")

    model.model.layers[1].register_forward_hook(refuse)
    with pytest.raises(UserError, match="^--deterministic: put_ does not have") as error:
        fwanda_pruner.prune(model, calibration=tiny.tokens(16, 24), deterministic=True, progress=False)
    assert "\n" not in str(error.value) and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.fault("threads")
def test_deterministic_runs_in_several_threads_restore_what_was_there_before_the_first():
    inside, ends, seen = threading.Barrier(3), [threading.Event() for _ in range(3)], []
    config = PruneConfig(deterministic=True)

    def run(number):
        with device_rules(torch.nn.Linear(2, 2), config):
            inside.wait()
            ends[number].wait()
            seen.append(torch.are_deterministic_algorithms_enabled())

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread, end in zip(threads, ends, strict=True):  # the first ends first
        end.set()
        thread.join()
    assert seen == [True] * 3 and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.fault("warnings")
def test_warnings_made_errors_lose_no_record_once_weights_have_changed():
    model = tiny.llama()
    model.model.layers[0].mlp.up_proj.weight.data.zero_()  # more zeros than asked for: a warning at the end
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        report = fwanda_pruner.prune(model, method="magnitude", sparsity=0.1, progress=False)
    assert any("zero" in line for line in report.warnings)


@pytest.mark.fault("warnings")
def test_a_warning_made_an_error_before_the_first_change_leaves_the_weights():
    model = tiny.llama()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning, match="--device cuda has no effect"):
            fwanda_pruner.prune(model, method="magnitude", device="cuda", progress=False)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with pytest.warns(UserWarning, match="--device cuda has no effect"):
        fwanda_pruner.prune(model, method="magnitude", device="cuda", progress=False)
