"""Statistics against retained gradients of the summed loss."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fwanda_kernels as fk

BATCH, LENGTH, VOCAB, WIDTH = 3, 7, 19, 8


class Block(nn.Module):
    """q, k and v share an input, gate and up another."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        x = x + self.o(torch.tanh(self.q(x) * self.k(x)) + self.v(x))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Tiny(nn.Module):
    """Two blocks; `mode` is None, "reentrant" or "non_reentrant"."""

    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, mode=None):
        x = self.embedding(ids).detach().requires_grad_(torch.is_grad_enabled())
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=mode == "reentrant") if mode else block(x)
        return self.head(x)


def tiny() -> tuple[Tiny, torch.Tensor]:
    torch.manual_seed(0)
    return Tiny().requires_grad_(False), torch.randint(VOCAB, (BATCH, LENGTH))


def linears(model: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "head" not in n}


def loss_of(logits, ids) -> torch.Tensor:
    """Sum over all positions, so that padding has gradients too and must be masked."""
    return F.cross_entropy(logits.flatten(0, -2).float(), ids.roll(-1, 1).flatten(), reduction="sum")


def padding(shape=(BATCH, LENGTH)) -> torch.Tensor:
    mask = torch.ones(shape, dtype=torch.bool)
    mask[0, 4:], mask[1, :2] = False, False
    return mask


def expected_statistics(model, backward, mask=None) -> dict[str, tuple]:
    """name -> (x2, g2, n_tokens) in float64, from retained inputs and retained gradients of the outputs."""
    kept, handles = {}, []
    for name, module in linears(model).items():

        def keep(_module, inputs, output, name=name):
            output.retain_grad()
            kept[name] = (inputs[0].detach(), output)

        handles.append(module.register_forward_hook(keep))
    backward()
    for handle in handles:
        handle.remove()
    chosen = slice(None) if mask is None else mask
    count = BATCH * LENGTH if mask is None else int(mask.sum())
    sums = {
        name: [t[chosen].double().square().flatten(0, -2).sum(0) for t in (x, y.grad)] for name, (x, y) in kept.items()
    }
    return {name: (x2, g2, count) for name, (x2, g2) in sums.items()}


def assert_statistics(stats, expected, times=1):
    assert list(stats) == list(expected)
    for name, (x2, g2, count) in expected.items():
        layer = stats[name]
        assert layer.n_tokens == times * count and layer.x2.dtype == layer.g2.dtype == torch.float32
        torch.testing.assert_close(layer.x2.double(), times * x2, rtol=1e-5, atol=0)
        torch.testing.assert_close(layer.g2.double(), times * g2, rtol=1e-3, atol=1e-5 * g2.max().item())


masks = pytest.mark.parametrize("mask", [None, padding()], ids=["all", "padded"])


@pytest.mark.fault("padding")
@masks
@pytest.mark.parametrize("mode", [None, "reentrant", "non_reentrant"])
def test_statistics_are_those_of_retained_gradients(mode, mask):
    model, ids = tiny()
    expected = expected_statistics(model, lambda: loss_of(model(ids), ids).backward(), mask)
    with fk.collect_statistics(linears(model)) as stats:
        stats.token_mask = mask
        loss_of(model(ids, mode), ids).backward()
    assert_statistics(stats, expected)


@pytest.mark.fault("grouped queries")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@masks
@pytest.mark.parametrize("mode", [None, "reentrant", "non_reentrant"])
def test_statistics_of_a_llama_with_grouped_queries(mode, mask):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = transformers.LlamaForCausalLM(config).requires_grad_(False)
    ids = torch.randint(VOCAB, (BATCH, LENGTH))
    embedded = model.get_input_embeddings()(ids)

    def backward():
        inputs = embedded.clone().requires_grad_()
        attention_mask = None if mask is None else mask.long()
        loss_of(model(inputs_embeds=inputs, attention_mask=attention_mask, use_cache=False).logits, ids).backward()

    expected = expected_statistics(model, backward, mask)
    if mode:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": mode == "reentrant"})
        model.train()  # checkpointing is off in eval mode
    with fk.collect_statistics(linears(model)) as stats:
        stats.token_mask = mask
        backward()
    assert_statistics(stats, expected)


@pytest.mark.parametrize("mode", [None, "reentrant", "non_reentrant"])
def test_passes_accumulate(mode):
    model, ids = tiny()
    expected = expected_statistics(model, lambda: loss_of(model(ids), ids).backward())
    with fk.collect_statistics(linears(model)) as stats:
        for _ in range(2):
            loss_of(model(ids, mode), ids).backward()
    assert_statistics(stats, expected, times=2)


class ReducedWidths(TorchDispatchMode):
    """Collects the width of every input that is reduced to squared sums."""

    def __init__(self):
        super().__init__()
        self.widths = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.fwanda.accumulate_sq_sums_.default:
            self.widths.append(args[1].shape[-1])
        if func is torch.ops.fwanda.foreach_accumulate_sq_sums_.default:
            self.widths.extend(x.shape[-1] for x in args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [None, "reentrant", "non_reentrant"])
def test_shared_inputs_are_reduced_once(mode):
    model, ids = tiny()
    with ReducedWidths() as reduced, fk.collect_statistics(linears(model)):
        output = model(ids, mode)
        assert reduced.widths == [WIDTH, WIDTH, WIDTH, 12] * 2  # q/k/v, o, gate/up, down
        loss_of(output, ids).backward()
    assert len(reduced.widths) == 2 * (4 + 7)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@masks
def test_forward_alone_gives_x2_and_no_g2(context, mask):
    model, ids = tiny()
    expected = expected_statistics(model, lambda: loss_of(model(ids), ids).backward(), mask)
    with context(), fk.collect_statistics(linears(model)) as stats:
        stats.token_mask = mask
        model(ids)
    assert_statistics(stats, {name: (x2, 0 * g2, n) for name, (x2, g2, n) in expected.items()})


@pytest.mark.fault("no gradient")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 5, 8), (10, 8)], ids=str)
@pytest.mark.parametrize("change", ["relu_", "mul_", "add_", "some columns"])
def test_an_output_that_is_changed_in_place_has_its_gradient(change, shape, bias):
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 4, bias=bias), torch.randn(shape)

    def changed(y):
        if change == "some columns":
            y[..., :2] = 0
            return y
        return y.relu_() if change == "relu_" else getattr(y, change)(3.0)

    mask = torch.rand(shape[:-1]) < 0.6
    with fk.collect_statistics({"layer": layer}) as stats:
        stats.token_mask = mask
        changed(layer(x)).square().sum().backward()
    y = layer(x).detach().requires_grad_()
    changed(y.clone()).square().sum().backward()
    expected = y.grad[mask].square().sum(0)
    assert expected.any() and torch.allclose(stats["layer"].g2, expected, rtol=1e-5)


def test_gradients_may_follow_a_forward_in_inference_mode():
    model, ids = tiny()
    expected = expected_statistics(model, lambda: loss_of(model(ids), ids).backward())
    with fk.collect_statistics(linears(model)) as stats:
        with torch.inference_mode():
            model(ids)
        loss_of(model(ids), ids).backward()
    assert_statistics(stats, {name: (2 * x2, g2, 2 * n) for name, (x2, g2, n) in expected.items()})


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_an_input_modified_between_two_modules_is_reduced_again(context):
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with context(), fk.collect_statistics({"first": first, "second": second}) as stats:
        x = torch.ones(2, 4)
        first(x)
        second(x.mul_(3))
    assert stats["first"].x2.tolist() == [2.0] * 4 and stats["second"].x2.tolist() == [18.0] * 4


def test_a_mask_changed_between_two_modules_is_respected():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.ones(1, 3, 4)
    with torch.no_grad(), fk.collect_statistics({"first": first, "second": second}) as stats:
        first(x)
        stats.token_mask = torch.tensor([[True, False, False]])
        second(x)
    assert [(s.n_tokens, s.x2[0].item()) for s in stats.values()] == [(3, 3.0), (1, 1.0)]


def test_mismatching_mask_names_module_and_shapes():
    model, ids = tiny()
    with fk.collect_statistics(linears(model)) as stats:
        stats.token_mask = padding()[:, 1:]
        with pytest.raises(ValueError) as error:
            model(ids)
    text = str(error.value)
    assert "blocks.0.q" in text and "[3, 6]" in text and "[3, 7]" in text and "\n" not in text


def test_mask_must_be_bool():
    with pytest.raises(ValueError, match="token_mask must be bool, got torch.int64"):
        fk.collect_statistics({}).token_mask = padding().long()


def test_hooks_are_removed_even_after_an_exception():
    model, ids = tiny()
    with pytest.raises(KeyError), fk.collect_statistics(linears(model)) as stats:
        model(ids)
        raise KeyError
    model(ids)
    assert not any(module._forward_hooks for module in model.modules())
    assert {layer.n_tokens for layer in stats.values()} == {BATCH * LENGTH}


def test_statistics_can_be_listed_when_a_module_never_ran():
    used, idle = nn.Linear(4, 4), nn.Linear(4, 6)
    with torch.no_grad(), fk.collect_statistics({"used": used, "idle": idle}) as stats:
        used(torch.ones(2, 4))
    counts = {name: layer.n_tokens for name, layer in stats.items()}
    assert counts["used"] == 2 and counts.get("idle", 0) == 0 and len(stats) == len(counts)


def test_low_precision_models_have_fp32_sums():
    layer = nn.Linear(4, 4).bfloat16()
    x = torch.full((1, 300, 4), 3.0, dtype=torch.bfloat16, requires_grad=True)
    with fk.collect_statistics({"layer": layer}) as stats:
        layer(x).sum().backward()
    assert stats["layer"].x2.tolist() == [2700.0] * 4 and stats["layer"].g2.tolist() == [300.0] * 4


def test_norm_and_omega_are_the_root_of_x2_and_the_mean_of_g2():
    layer = fk.LayerStatistics(torch.tensor([4.0, 0.0, 2.0]), torch.tensor([6.0, 1.0]), n_tokens=3)
    assert torch.equal(layer.norm, torch.tensor([4.0, 0.0, 2.0]).sqrt()) and layer.norm.dtype == torch.float32
    assert torch.equal(layer.omega, torch.tensor([6.0, 1.0], dtype=torch.float64) / 3)


def test_a_module_without_a_token_has_norms_of_one_and_no_fisher_information():
    layer = fk.LayerStatistics(torch.zeros(3), torch.zeros(2), n_tokens=0)
    assert layer.norm.tolist() == [1.0] * 3 and layer.omega.tolist() == [0.0] * 2


def test_start_and_stop_collect_as_the_block_does_and_may_be_repeated():
    model, ids = tiny()
    expected = expected_statistics(model, lambda: loss_of(model(ids), ids).backward())
    stats = fk.collect_statistics(linears(model))
    model(ids)
    for _ in range(2):
        stats.start()
        stats.start()
        loss_of(model(ids), ids).backward()
        stats.stop()
        model(ids)
    assert_statistics(stats, expected, times=2)
    assert not any(module._forward_hooks for module in model.modules())


def test_reset_starts_again_from_zero_and_leaves_what_was_read():
    model, ids = tiny()
    expected = expected_statistics(model, lambda: loss_of(model(ids), ids).backward())
    stats = fk.collect_statistics(linears(model))
    before = {}
    for _ in range(2):
        stats.reset()
        assert all(layer.n_tokens == 0 and not layer.x2.any() and not layer.g2.any() for layer in stats.values())
        with stats:
            loss_of(model(ids), ids).backward()
        assert_statistics(stats, expected)
        assert_statistics(before or stats, expected)
        before = dict(stats)


def test_compiled_code_is_measured_at_once_after_a_reset():
    """Modules with one input still share it: it is reduced once for q, k and v."""
    model, ids = tiny()
    expected = expected_statistics(model, lambda: loss_of(model(ids), ids).backward())
    stats = fk.collect_statistics(linears(model))
    with stats:
        model(ids)
    stats.reset()
    with stats:
        loss_of(torch.compile(model, backend="aot_eager")(ids), ids).backward()
    assert_statistics(stats, expected)


def test_unseen_names_the_modules_that_were_never_called():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with torch.no_grad(), fk.collect_statistics({"first": first, "second": second}) as stats:
        assert stats.unseen == ["first", "second"]
        second(torch.ones(1, 4))
    assert stats.unseen == ["first"]


@pytest.mark.fault("compiled before")
@pytest.mark.parametrize("name", ["fc", "other"])
def test_a_name_without_statistics_is_an_error_that_says_why(name):
    layer = torch.nn.Linear(4, 4)
    with fk.collect_statistics({"fc": layer}) as stats, pytest.raises(KeyError, match=f"no statistics of '{name}'"):
        stats[name]
    assert stats.get(name) is None and name not in stats


@pytest.mark.fault("compiled before")
def test_a_closure_that_was_compiled_before_is_not_measured_and_the_error_says_so():
    layer, x = torch.nn.Linear(4, 4), torch.ones(3, 4)
    torch._dynamo.reset()
    closure = torch.compile(lambda x: layer(x) * 2, backend="eager")
    closure(x)
    with fk.collect_statistics({"fc": layer}) as stats:
        closure(x)
    if "fc" in stats:  # a torch that compiles anew when a hook is added
        assert stats["fc"].n_tokens == 3
    else:
        assert stats.unseen == ["fc"]
        with pytest.raises(KeyError, match="compiled before start"):
            stats["fc"]
