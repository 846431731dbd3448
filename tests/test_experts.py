"""Experts in 3-D parameters: each is a target with statistics of its own, and the files hold what the report says."""

import pytest
import torch
from tiny import EXPERTS, FUSED, RUNS, TEXT, build, check_counts, prune, run_name
from torch import nn

import fwanda_pruner
from fwanda_pruner.model.experts import CannotSplit, count_experts, run_split, split_experts
from fwanda_pruner.model.load import load_model
from fwanda_pruner.model.targets import find_blocks, find_targets


@pytest.mark.fault("model classes")
@pytest.mark.fault("fused experts")
@pytest.mark.parametrize("settings", [*RUNS, {"method": "fwanda", "allocation": "row"}], ids=run_name)
@pytest.mark.parametrize("family", EXPERTS)
def test_every_expert_is_pruned_exactly_and_the_router_stays_dense(family, settings):
    model = build(family)
    routers = {name: p.clone() for name, p in model.named_parameters() if "router" in name or "gate.w" in name}
    report = prune(model, **settings)
    rows = check_counts(model, report)
    _, _, _, weights, per_block = EXPERTS[family]
    assert sum(row.numel for row in rows) == 2 * weights
    skipped = [row for row in report.matrices if row.skipped is not None]
    assert len(skipped) == 2 * per_block and {row.skipped for row in skipped} == {
        "a router to the experts, which stays dense"
    }
    assert routers and all(torch.equal(model.get_parameter(name), p) for name, p in routers.items())
    blocks = sum(p.numel() for p in find_blocks(model)[1].parameters())
    assert report.coverage["blocks"] == 2 * weights / blocks > 0.95
    if settings["allocation" if "allocation" in settings else "method"] != "global":
        assert all(row.kept == row.numel // 2 for row in rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FUSED)
def test_split_experts_compute_what_the_fused_ones_do(family, dtype):
    model = build(family, dtype)
    before = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    targets = find_targets(model)[0]
    experts = [target.slice_of.experts for target in targets if target.slice_of is not None]
    assert experts
    calls = []
    with torch.no_grad(), run_split(experts):
        experts[0].layers[next(iter(experts[0].layers))][0].register_forward_hook(lambda *_: calls.append(1))
        split = model(TEXT).logits.float()
    with torch.no_grad():
        fused = model(TEXT).logits.float()
    assert calls
    assert (split - fused).norm() <= (1e-5 if dtype == torch.float32 else 3e-2) * fused.norm()
    assert before == {name: module.__dict__.get("forward") for name, module in model.named_modules()}


@pytest.mark.parametrize("family", FUSED)
def test_slices_share_the_memory_of_their_parameter(family):
    model = build(family)
    for target in find_targets(model)[0]:
        if target.slice_of is None:
            continue
        held = model.get_parameter(target.slice_of.parameter)[target.slice_of.index]
        assert f".{target.slice_of.index}" in target.name
        target.weight[0, 0] = 77
        assert held[0, 0] == 77 and sorted(held.shape) == sorted(target.weight.shape)


def routing(model, block: int):
    """Input, chosen experts, weights and output gradient of the experts of a block, for the summed loss of TEXT."""
    experts = find_blocks(model)[1][block].mlp.experts
    seen = {}

    def hook(_module, args, output):
        seen["x"], seen["index"], seen["weights"] = args
        output.register_hook(lambda gradient: seen.update(gradient=gradient))

    handle = experts.register_forward_hook(hook)
    logits = model(TEXT).logits[:, :-1]
    nn.functional.cross_entropy(logits.flatten(0, 1), TEXT[:, 1:].flatten(), reduction="sum").backward()
    handle.remove()
    model.zero_grad()
    return seen


@pytest.mark.skipif("mixtral" not in FUSED, reason="transformers 4 has lists of linear layers")
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_statistics_of_an_expert_are_those_of_the_tokens_routed_to_it(family):
    model = build(family)
    config = fwanda_pruner.PruneConfig()
    statistics = fwanda_pruner.collect(model, config=config, calibration=TEXT, progress=False)
    assert set(statistics.x2) == set(statistics.g2) == {target.name for target in find_targets(model)[0]}
    for block in range(2):
        seen, total = routing(model, block), 0
        for expert in range(4):
            name = f"model.layers.{block}.mlp.experts.{expert}"
            tokens, slots = torch.where(seen["index"] == expert)
            x2 = seen["x"][tokens].square().sum(0)
            torch.testing.assert_close(statistics.x2[f"{name}.gate_up_proj"], x2, rtol=1e-4, atol=1e-6)
            g2 = (seen["gradient"][tokens] * seen["weights"][tokens, slots, None]).square().sum(0)
            torch.testing.assert_close(statistics.g2[f"{name}.down_proj"], g2, rtol=1e-3, atol=1e-9)
            assert statistics.n_tokens[f"{name}.down_proj"] == len(tokens)
            total += len(tokens)
        assert total == 2 * TEXT.numel()


@pytest.mark.fault("unrouted expert")
@pytest.mark.parametrize("settings", [{"method": "fwanda", "allocation": "global"}, {"method": "sparsegpt"}], ids=str)
def test_an_expert_that_saw_no_token_is_named_and_ranked_by_magnitude(settings):
    model, dense = build("gpt_oss"), build("gpt_oss")
    for m in (model, dense):
        for block in m.model.layers:
            block.mlp.router.bias.data[3] = -1e4
    with pytest.warns(UserWarning, match=r"4 matrices \(.*\.0\.mlp\.experts\.3\.down_proj.* saw no calibration token"):
        report = prune(model, **settings)
    check_counts(model, report)
    for target, before in zip(find_targets(model)[0], find_targets(dense)[0], strict=True):
        if target.name.endswith("1.mlp.experts.3.down_proj") and settings["method"] == "fwanda":
            ranked = before.weight.abs().sort(dim=1).values
            kept = target.weight != 0
            assert kept.sum(1).eq(24).all()
            assert before.weight.abs()[kept].view(-1, 24).amin(1).ge(ranked[:, 23]).all()


@pytest.mark.fault("reload")
@pytest.mark.parametrize("family", EXPERTS)
def test_a_saved_model_of_experts_loads_with_the_zeros_of_its_report(family, tmp_path, recwarn):
    model = build(family)
    report = prune(model, method="wanda")
    fwanda_pruner.save_pruned(model, None, report, tmp_path / "out")
    assert not [w for w in recwarn if "not counted" in str(w.message)]
    loaded = load_model(str(tmp_path / "out"), device="cpu").model
    assert torch.equal(loaded(TEXT).logits, model(TEXT).logits)
    rows = check_counts(loaded, fwanda_pruner.Report.load(tmp_path / "out"))
    assert (family in FUSED) == any(row.tensor is not None for row in rows)
    for row in rows:
        if row.tensor is not None:
            assert loaded.get_parameter(row.tensor)[row.index].numel() == row.numel


def test_a_file_with_other_zeros_than_its_report_is_not_kept(tmp_path):
    model = build("gpt_oss")
    report = prune(model, method="wanda")
    model.model.layers[1].mlp.experts.down_proj.data[2, 0] = 0
    with pytest.raises(RuntimeError, match=r"layers\.1\.mlp\.experts\.2\.down_proj"):
        fwanda_pruner.save_pruned(model, None, report, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Experts(nn.Module):
    """Fused experts with a gate of their own."""

    def __init__(self, scale: float):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 6))
        self.down_proj = nn.Parameter(torch.randn(3, 6, 4))
        self.act_fn, self.scale = nn.SiLU(), scale

    def forward(self, hidden, index, weights):
        output = torch.zeros_like(hidden)
        for slot in range(index.shape[1]):
            up = torch.einsum("rch,th->rtc", self.gate_up_proj, hidden)[index[:, slot], torch.arange(len(hidden))]
            gate, up = up.chunk(2, dim=-1)
            down = torch.einsum("thi,ti->th", self.down_proj[index[:, slot]], self.act_fn(gate) * up)
            output += self.scale * down * weights[:, slot, None]
        return output


def test_experts_that_compute_something_else_are_refused_with_the_reason():
    assert split_experts(Experts(1.0)) is not None
    with pytest.raises(CannotSplit, match="outputs differ"):
        split_experts(Experts(1.01))
    assert split_experts(nn.Conv1d(4, 4, 3)) is None and count_experts(nn.Conv1d(4, 4, 3)) == 0


@pytest.mark.fault("fused experts")
def test_experts_that_cannot_be_split_are_listed_with_the_reason_and_left_dense():
    model = build("gpt_oss")
    model.model.layers[1].mlp.experts.forward = lambda *args, **kwargs: 0
    report = prune(build("gpt_oss"), method="magnitude")
    targets, skipped = find_targets(model)
    listed = {item.name: item.reason for item in skipped if ".experts." in item.name}
    assert len(targets) == len([row for row in report.matrices if row.skipped is None]) - 8
    assert "model.layers.1.mlp.experts.down_proj" in listed
    assert all("cannot be run as separate linear layers (" in reason for reason in listed.values())
