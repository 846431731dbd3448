"""The next-token loss on slices of the positions: never all logits at once, whatever the model does in its head."""

import math
import threading
from functools import partial

import oracle
import pytest
import tiny
import torch
import transformers
from measuring import LARGE_VOCABULARY, SLICE, engine_of, slices_of
from torch import nn

from fwanda_pruner.allocate.judge import domain_losses
from fwanda_pruner.engine.loop import PassSettings
from fwanda_pruner.engine.losses import backward_of_summed_loss, find_decoder, sample_labels, summed_losses
from fwanda_pruner.engine.sums import Sums


def run(model, tokens, kind: str) -> None:
    engine = engine_of(model, micro_batch=len(tokens))
    if kind == "loss":
        engine.window_losses(tokens)
        return
    engine.measure(tokens, Sums(), backward=True, label_seed=0 if kind == "drawn" else None)


@pytest.mark.parametrize("kind", ["loss", "backward", "drawn"])
def test_the_head_never_holds_more_logits_than_a_slice(kind):
    model, tokens = tiny.llama(vocab_size=LARGE_VOCABULARY), tiny.tokens(3, 54)
    with slices_of(model) as positions:
        run(model, tokens, kind)
    assert sum(positions) == 3 * 53 and len(positions) == 3
    assert max(positions) * LARGE_VOCABULARY <= SLICE


@pytest.mark.parametrize(
    "samples, length, expected", [(1, 65, [64]), (1, 66, [33, 32]), (2, 50, [49, 49]), (1, 141, [47, 47, 46])]
)
def test_the_slices_differ_by_at_most_one_position(samples, length, expected):
    model = tiny.llama(vocab_size=LARGE_VOCABULARY)
    with slices_of(model) as positions:
        run(model, tiny.tokens(samples, length), "loss")
    assert positions == expected


@pytest.mark.parametrize("vocabulary, samples, length", [(64, 3, 24), (LARGE_VOCABULARY, 1, 80)])
@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_the_loss_of_each_window_is_that_of_whole_logits(vocabulary, samples, length, micro_batch):
    model, tokens = tiny.llama(vocab_size=vocabulary), tiny.tokens(samples, length)
    settings = PassSettings(micro_batch, compile="off")
    found = engine_of(model).window_losses(tokens, settings=settings)
    assert found.dtype == torch.float64 and found.device.type == "cpu"
    torch.testing.assert_close(found, oracle.losses(model, tokens).double().mean(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("first_target", [1, 2, 10])
def test_the_loss_begins_at_the_first_target(first_target):
    model, tokens = tiny.llama(), tiny.tokens(3, 24)
    found = summed_losses(model, find_decoder(model), tokens, first_target=first_target)
    assert found.dtype == torch.float64 and found.shape == (3,)
    expected = oracle.losses(model, tokens)[:, first_target - 1 :].sum(1).double()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_finding_the_decoder_does_not_disturb_other_threads():
    """The hook that finds it is global: another thread may run another model meanwhile."""
    first, second = tiny.llama(), tiny.llama(seed=1)
    expected = second(tiny.tokens(1, 8)).logits
    inside, left, logits = threading.Event(), threading.Event(), []

    def run() -> None:
        inside.wait(60)
        logits.append(second(tiny.tokens(1, 8)).logits)
        left.set()

    thread = threading.Thread(target=run)
    thread.start()
    handle = first.register_forward_pre_hook(lambda *_: (inside.set(), left.wait(60)) and None)
    assert find_decoder(first) is first.model
    handle.remove()
    thread.join()
    assert logits and torch.equal(logits[0], expected)


def test_a_held_out_loss_that_is_not_finite_is_inf():
    model = tiny.llama(tie_word_embeddings=False)
    model.lm_head.weight.data[3] = math.nan
    assert engine_of(model).window_losses(tiny.tokens(2, 24)).isnan().all()
    assert domain_losses(engine_of(model), {"text": tiny.tokens(2, 24)}) == {"text": math.inf}


def gemma2(cap: float | None, vocabulary: int = LARGE_VOCABULARY):
    """Gemma 2 caps its logits, so its head is more than a matrix."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=cap,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config).eval().requires_grad_(False)


@pytest.mark.parametrize("vocabulary, length", [(64, 24), (LARGE_VOCABULARY, 48)])
def test_the_backward_pass_keeps_what_the_model_does_after_its_decoder(vocabulary, length):
    """Over one slice, and over two."""
    model = gemma2(0.1, vocabulary)
    outputs = []
    model.get_input_embeddings().register_forward_hook(lambda _m, _i, out: outputs.append(out.requires_grad_(True)))
    ids = tiny.tokens(2, length)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    backward_of_summed_loss(model, find_decoder(model), ids)
    torch.testing.assert_close(outputs[0].grad, outputs[1].grad)
    assert "forward" not in vars(find_decoder(model))


def test_the_loss_keeps_what_the_model_does_after_its_decoder():
    capped, plain, ids = gemma2(0.1, 64), gemma2(None, 64), tiny.tokens(2, 24)
    losses = [summed_losses(model, find_decoder(model), ids) for model in (capped, plain)]
    torch.testing.assert_close(losses[0], oracle.losses(capped, ids).sum(1).double(), rtol=1e-6, atol=0)
    assert not torch.equal(*losses)


@pytest.mark.parametrize("build", [tiny.llama, partial(tiny.build, "gpt2"), partial(tiny.build, "llava")])
def test_the_decoder_is_all_but_the_head(build):
    model = build()
    decoder = find_decoder(model)
    modules = set(decoder.modules())
    assert model.get_output_embeddings() not in modules and model.get_input_embeddings() in modules


# Labels that the model draws


def test_labels_are_drawn_with_the_probabilities_of_the_model(monkeypatch):
    """Evenly spaced numbers in place of random ones: each label must come up in its share of them."""
    count = 100_000
    monkeypatch.setattr(torch, "rand", lambda n, *_, **__: (torch.arange(n).double()[:, None] + 0.5) / n)
    logits = torch.tensor([1.0, -2.0, -torch.inf, 3.0, 0.0, -torch.inf])
    labels = sample_labels(logits.softmax(-1).expand(count, -1), torch.Generator())
    shares = torch.bincount(labels, minlength=6).double() / count
    torch.testing.assert_close(shares, logits.double().softmax(-1), rtol=0, atol=2 / count)


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_no_draw_leaves_the_vocabulary_or_meets_an_impossible_label(draw, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda n, *_, **__: torch.full((n, 1), draw, dtype=torch.float64))
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, 2.0]])
    assert sample_labels(logits.softmax(-1), torch.Generator()).item() == (1 if draw == 0 else 3)


def test_labels_do_not_depend_on_how_positions_are_split_into_calls():
    probabilities = torch.randn(30, 64).softmax(-1)
    whole, parts = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    labels = [sample_labels(part, parts) for part in probabilities.split([1, 20, 9])]
    assert sample_labels(probabilities, whole).equal(torch.cat(labels))
