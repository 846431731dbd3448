"""Models that cannot be pruned in place and saved are refused in one line, before any text is read."""

import copy

import accelerate
import pytest
import tiny
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import parametrizations, prune

import fwanda_pruner
from fwanda_pruner import PruneConfig, UserError

TOKENS = tiny.tokens(4, 16)


class LoraLinear(nn.Module):
    """An adapter as peft and many scripts build it, around the linear layer of a model."""

    def __init__(self, linear):
        super().__init__()
        self.base_layer = linear
        self.lora_A = nn.Linear(linear.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, linear.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class LinearWithAdapter(nn.Linear):
    """An adapter inside the linear layer."""

    def __init__(self, *args):
        super().__init__(*args)
        self.down, self.up = nn.Parameter(torch.ones(2, self.in_features)), nn.Parameter(torch.ones(2))


def query(model):
    return model.model.layers[1].self_attn.q_proj


def replace_query(model, module):
    model.model.layers[1].self_attn.q_proj = module
    return model


def with_weight(model, change):
    layer = query(model)
    layer.weight = nn.Parameter(change(layer.weight.detach()), requires_grad=False)
    return model


def sharded(model):
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    return with_weight(model, lambda w: DTensor.from_local(w, mesh, [Replicate()], run_check=False))


def on_meta(_model):
    with torch.device("meta"):
        return tiny.llama()


def buffer_on_meta(model):
    model.model.rotary_emb.to("meta")
    return model


def compiled_in_place(model):
    model.model.layers[1].mlp.compile()
    return model


def compiled_forward(model):
    model.model.forward = torch.compile(model.model.forward)
    return model


def compiled_within(model):
    model.model.layers[1] = torch.compile(model.model.layers[1])
    return model


def pruned_by_torch(model):
    prune.l1_unstructured(query(model), "weight", 0.5)
    return model


def parametrised(model):
    parametrizations.weight_norm(query(model))
    return model


def parametrised_embedding(model):
    parametrizations.weight_norm(model.model.embed_tokens)
    return model


def weight_norm(model):
    nn.utils.weight_norm(query(model))
    return model


def wrapped_within(model):
    model.model.layers[1].mlp = nn.DataParallel(model.model.layers[1].mlp)
    return model


def quantised_in_config(model):
    model.config.quantization_config = {"quant_method": "gptq"}
    return model


def quantised_by_torch(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def no_parameter(model):
    weight = query(model).weight.detach()
    del query(model).weight
    query(model).weight = weight
    return model


def freed(model):
    query(model).weight.untyped_storage().resize_(0)
    return model


def of_uninitialised(model):
    return replace_query(model, nn.LazyLinear(32, bias=False))


class OwnParameter(nn.Parameter):
    pass


def of_own_class(model):
    query(model).weight = OwnParameter(query(model).weight.detach())
    return model


def offloaded_within(model):
    accelerate.cpu_offload(model.model.layers[1], execution_device=torch.device("cpu"))
    return model


def offloaded_with_hook(model):
    accelerate.cpu_offload_with_hook(model, execution_device=torch.device("cpu"))
    return model


UNUSUAL = {
    "meta": (on_meta, "model.embed_tokens.weight is on the meta device"),
    "buffer on meta": (buffer_on_meta, "rotary_emb.*inv_freq is on the meta device"),
    "offloaded": (lambda m: accelerate.cpu_offload(m, torch.device("cpu")), "is offloaded by accelerate"),
    "offloaded within": (offloaded_within, r"model\.layers\.1.* is offloaded by accelerate"),
    "offloaded with hook": (offloaded_with_hook, "the model is offloaded by accelerate"),
    "DataParallel": (nn.DataParallel, "the model is wrapped by DataParallel; give .* model.module"),
    "DataParallel within": (wrapped_within, r"model\.layers\.1\.mlp is wrapped by DataParallel"),
    "sharded": (sharded, "q_proj.weight is sharded .DTensor."),
    "own class": (of_own_class, "q_proj.weight is a OwnParameter, expected a plain nn.Parameter"),
    "uninitialised": (of_uninitialised, "q_proj.weight has no shape yet"),
    "int8": (lambda m: with_weight(m, lambda w: w.char()), "q_proj.weight is quantised .torch.int8."),
    "float8": (lambda m: with_weight(m, lambda w: w.to(torch.float8_e4m3fn)), "q_proj.weight is quantised"),
    "quantised": (quantised_in_config, "the model is quantised .gptq."),
    "quantised by torch": (quantised_by_torch, "q_proj is quantised .torch.ao.nn.quantized"),
    "no parameter": (no_parameter, "q_proj has a weight that is no nn.Parameter"),
    "sparse": (lambda m: with_weight(m, lambda w: w.to_sparse_csr()), "q_proj.weight is stored as torch.sparse_csr"),
    "expanded": (lambda m: with_weight(m, lambda w: w[:1].expand(32, 32)), "q_proj.weight has entries that share"),
    "freed": (freed, "q_proj.weight has no memory any more"),
    "overlapping": (
        lambda m: with_weight(m, lambda w: w.flatten().as_strided((32, 32), (16, 1))),
        "q_proj.weight has entries that share",
    ),
    "parametrised": (parametrised, "q_proj is parametrised; remove"),
    "parametrised embedding": (parametrised_embedding, "embed_tokens is parametrised; remove"),
    "weight_norm": (weight_norm, "q_proj computes its weight from other tensors"),
    "pruned by torch": (pruned_by_torch, "q_proj computes its weight from other tensors"),
}  # fmt: skip
COMPILED = {
    "whole": (torch.compile, "the model is a wrapper of torch.compile; give the model itself, model._orig_mod"),
    "block": (
        compiled_within,
        r"model\.layers\.1 is a wrapper of torch.compile; take it away by model\.set_submodule.*_orig_mod",
    ),
    "in place": (compiled_in_place, r"model\.layers\.1\.mlp is compiled in place"),
    "forward": (compiled_forward, "^model is compiled in place"),
    "torch.jit": (
        lambda m: replace_query(m, torch.jit.trace(query(m), torch.ones(1, 32))), "q_proj is compiled by torch.jit",
    ),
}  # fmt: skip


def add_adapters_of_peft(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def load_adapter_of_peft(model):
    peft = pytest.importorskip("peft")
    try:
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    except ValueError as error:
        pytest.skip(str(error))
    return model


ADAPTED = {
    "a module": (lambda m: replace_query(m, LoraLinear(query(m))), "q_proj.* holds adapters"),
    "a linear layer": (lambda m: replace_query(m, LinearWithAdapter(32, 32)), "q_proj holds adapters"),
    "peft": (add_adapters_of_peft, "the model holds adapters .PeftModel.*merge_and_unload"),
    "peft in the model": (load_adapter_of_peft, "q_proj holds adapters .*merge_and_unload"),
}


def refuse(model, match):
    """Asserts that every way into the package refuses a model in one line."""
    config = PruneConfig(eval=("text.txt",))
    calls = [
        *(
            lambda method=method: fwanda_pruner.prune(model, method=method, calibration=TOKENS, progress=False)
            for method in ("magnitude", "wanda", "sparsegpt", "fwanda")
        ),
        lambda: fwanda_pruner.collect(model, config=PruneConfig(), calibration=TOKENS, progress=False),
        lambda: fwanda_pruner.evaluate_model(model, None, config=config, progress=False),
    ]
    for call in calls:
        with pytest.raises(UserError, match=match) as refused:
            call()
        assert "\n" not in str(refused.value)


@pytest.mark.fault("unusual weights")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", UNUSUAL)
def test_a_model_that_is_not_plain_is_refused_in_one_line(case):
    change, match = UNUSUAL[case]
    refuse(change(tiny.llama()), match)


@pytest.mark.fault("unusual weights")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_on_two_devices_are_refused_on_gpu():
    model = tiny.llama()
    model.model.layers[1].to("cuda")
    refuse(model, r"the model lies on 2 devices \(model\.embed_tokens\.weight on cpu, model\.layers\.1.* on cuda:0\)")


@pytest.mark.fault("compiled")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", COMPILED)
def test_a_compiled_part_is_found_at_any_depth_before_anything_runs(case):
    change, match = COMPILED[case]
    model = tiny.llama()
    model.model.embed_tokens.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    refuse(change(model), match)


@pytest.mark.fault("compiled")
def test_a_wrapper_is_taken_away_as_the_error_says():
    model = compiled_within(tiny.llama())
    with pytest.raises(UserError) as refused:
        tiny.prune(model, method="magnitude")
    exec(str(refused.value).partition("by ")[2].partition(", and")[0], {"model": model})
    assert tiny.prune(model, method="magnitude").sparsity["asked"] == 0.5


@pytest.mark.fault("adapters")
@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_are_refused_by_name(case):
    change, match = ADAPTED[case]
    refuse(change(tiny.llama()), match)


@pytest.mark.fault("adapters")
def test_a_model_with_merged_adapters_is_pruned_and_saved(tmp_path):
    model = add_adapters_of_peft(tiny.llama()).merge_and_unload()
    report = fwanda_pruner.prune(model, method="magnitude", progress=False)
    fwanda_pruner.save_pruned(model, None, report, tmp_path / "out")
    assert report.sparsity["matrices"] == pytest.approx(0.5, abs=1e-3) and len(report.matrices) == 14


# One module or tensor at two places


def block_twice(model):
    model.model.layers[1] = model.model.layers[0]


def linear_of_two_blocks(model):
    model.model.layers[1].mlp.up_proj = model.model.layers[0].mlp.up_proj


def linear_twice_in_a_block(model):
    model.model.layers[0].mlp.up_proj = model.model.layers[0].mlp.gate_proj


def parameter_of_two_linears(model):
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def norm_of_two_blocks(model):
    model.model.layers[1].input_layernorm.weight = model.model.layers[0].input_layernorm.weight


def data_of_two_linears(model):
    model.model.layers[1].mlp.up_proj.weight.data = model.model.layers[0].mlp.up_proj.weight.data


def overlapping_parts(model):
    memory = torch.randn(40, 32)
    model.model.layers[0].self_attn.q_proj.weight = nn.Parameter(memory[:32])
    model.model.layers[1].self_attn.q_proj.weight = nn.Parameter(memory[8:])


def undeclared_tie(model):
    model.config.tie_word_embeddings = False


def head_of_a_block(model):
    model.lm_head.weight = model.model.layers[0].mlp.up_proj.weight


TWICE = {
    block_twice: r"model\.layers\.1 and model\.layers\.0 are one module at two places; .*copy\.deepcopy",
    linear_of_two_blocks: r"model\.layers\.1\.mlp\.up_proj and model\.layers\.0\.mlp\.up_proj are one module",
    linear_twice_in_a_block: r"model\.layers\.0\.mlp\.up_proj and model\.layers\.0\.mlp\.gate_proj are one module",
    parameter_of_two_linears: r"layers\.0\.mlp\.up_proj\.weight and .*layers\.1\.mlp\.up_proj\.weight share memory",
    norm_of_two_blocks: r"layers\.0\.input_layernorm\.weight and .*layers\.1\.input_layernorm\.weight share memory",
    data_of_two_linears: r"layers\.0\.mlp\.up_proj\.weight and .*layers\.1\.mlp\.up_proj\.weight share memory",
    overlapping_parts: r"layers\.0\.self_attn\.q_proj\.weight and .*layers\.1\.self_attn\.q_proj\.weight share memory",
    head_of_a_block: r"layers\.0\.mlp\.up_proj\.weight.* share memory",
    undeclared_tie: "are one tensor, but model.config.tie_word_embeddings is False",
}


@pytest.mark.fault("one module twice")
@pytest.mark.parametrize("share", TWICE, ids=lambda share: share.__name__)
def test_what_stands_at_two_places_is_refused_before_pruning(share):
    model = tiny.llama()
    share(model)
    before = copy.deepcopy(model.state_dict())
    refuse(model, TWICE[share])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.fault("one module twice")
def test_tied_embeddings_and_parts_of_one_buffer_are_plain(tmp_path):
    model = tiny.llama()
    memory = torch.randn(64, 32)
    for index, part in enumerate(memory.split(32)):
        model.model.layers[index].self_attn.q_proj.weight = nn.Parameter(part)
    report = fwanda_pruner.prune(model, method="wanda", calibration=TOKENS, progress=False)
    fwanda_pruner.save_pruned(model, None, report, tmp_path / "out")
    again = fwanda_pruner.load_model(str(tmp_path / "out"), device="cpu").model
    assert torch.equal(model(TOKENS).logits, again(TOKENS).logits)
    assert sum(row.numel for row in report.matrices) == sum(
        p.numel() for p in model.model.layers.parameters() if p.dim() == 2
    )
