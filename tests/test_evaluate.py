"""Perplexity, BOS choice, dense check."""

import math
import sys
from types import SimpleNamespace

import measuring
import oracle
import pytest
import tiny
import torch
from measuring import LARGE_VOCABULARY, SLICE, slices_of

from fwanda_pruner.config import PruneConfig
from fwanda_pruner.engine.engine import make_engine
from fwanda_pruner.errors import UserError
from fwanda_pruner.evaluate.perplexity import check_dense, check_pruned, choose_bos, perplexity, perplexity_of

SIZES = {"vocab_size": 300, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def model():
    return tiny.llama(**SIZES)


def tokens_of(samples, length, seed=1):
    return torch.randint(1, 300, (samples, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vocabulary, samples, length", [(300, 3, 12), (LARGE_VOCABULARY, 1, 80)])
def test_perplexity_is_exp_of_the_mean_loss_of_all_targets(vocabulary, samples, length):
    """Also where the logits of a window do not exist at once."""
    model, tokens = tiny.llama(vocab_size=vocabulary), tokens_of(samples, length)
    expected = oracle.perplexity(model, tokens)
    assert perplexity(model, tokens, progress=False) == pytest.approx(expected, rel=1e-5)
    assert perplexity(model, tokens.int(), progress=False) == pytest.approx(expected, rel=1e-5)


def test_perplexity_holds_no_more_logits_at_once_than_a_slice():
    model, tokens = tiny.llama(vocab_size=LARGE_VOCABULARY), tiny.tokens(2, 100)
    with slices_of(model) as positions:
        perplexity(model, tokens, progress=False)
    assert positions == [50, 49] * 2 and 50 * LARGE_VOCABULARY <= SLICE


def test_perplexity_of_a_bf16_model_computes_its_loss_in_fp32():
    model = tiny.llama(**SIZES).bfloat16()
    for window in tokens_of(4, 2):
        expected = oracle.perplexity(model, window[None])
        assert perplexity(model, window[None], progress=False) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_perplexity_evaluates_without_dropout_cache_or_gradients_and_puts_the_mode_back(training):
    model = tiny.llama(**SIZES)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.9
    tokens = tokens_of(2, 12)
    expected = perplexity(model, tokens, progress=False)
    model.train(training)
    seen = []
    for module in model.modules():
        module.register_forward_pre_hook(
            lambda m, args, kwargs: seen.append((m.training, torch.is_grad_enabled(), kwargs.get("use_cache", False))),
            with_kwargs=True,
        )
    assert perplexity(model, tokens, progress=False) == expected
    assert set(seen) == {(False, False, False)}
    assert all(module.training is training for module in model.modules()) and torch.is_grad_enabled()


def test_perplexity_runs_one_window_at_a_time_and_shows_its_label_on_a_terminal(model, capsys, monkeypatch):
    with measuring.input_sizes(model.get_input_embeddings()) as sizes:
        perplexity(model, tokens_of(2, 4), label="dense perplexity")
    assert sizes == [1, 1] and capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    perplexity(model, tokens_of(2, 4), label="dense perplexity")
    assert "dense perplexity: " in capsys.readouterr().err
    perplexity(model, tokens_of(2, 4), progress=False)
    assert capsys.readouterr().err == ""


def test_perplexity_that_overflows_is_inf_and_of_nan_logits_nan():
    model = tiny.llama(**SIZES)
    model.lm_head.weight.data *= 1e6
    assert perplexity(model, tokens_of(1, 8), progress=False) == math.inf
    model.lm_head.weight.data[3] = math.nan
    assert math.isnan(perplexity(model, tokens_of(1, 8), progress=False))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([[1, 300]]), r"token ids must be in \[0, 300\)"),
        (torch.tensor([[1, -1]]), "token ids"),
        (torch.tensor([1, 2]), "tokens must be integer"),
        (torch.tensor([[1.0, 2.0]]), "tokens must be integer"),
        (torch.tensor([[1]]), "tokens must be integer"),
    ],
)
def test_perplexity_refuses_tokens_the_model_cannot_take(model, tokens, message):
    with pytest.raises(UserError, match=message):
        perplexity(model, tokens, progress=False)


def test_choose_bos_compares_the_losses_of_the_same_targets(model):
    tokenizer, answers = SimpleNamespace(bos_token_id=0), set()
    for window in tokens_of(24, 8):
        without = oracle.losses(model, window[None, :-1])[0]
        with_bos = oracle.losses(model, torch.cat([torch.tensor([0]), window[:-1]])[None])[0, 1:]
        assert len(with_bos) == len(without) == 6
        answers.add(better := bool(with_bos.sum() < without.sum()))
        assert choose_bos(make_engine(model, []), tokenizer, window) is better
    assert answers == {False, True}


def test_choose_bos_never_feeds_more_tokens_than_the_window_has(model):
    lengths = []
    handle = model.get_input_embeddings().register_forward_pre_hook(lambda _m, args: lengths.append(args[0].shape[1]))
    choose_bos(make_engine(model, []), SimpleNamespace(bos_token_id=0), tokens_of(1, 8)[0])
    handle.remove()
    assert max(lengths) == 8 and 7 in lengths


def test_choose_bos_is_no_without_a_bos_token_or_with_nan_losses(model):
    window = tokens_of(1, 8)[0]
    assert choose_bos(None, SimpleNamespace(bos_token_id=None), window) is False
    broken = tiny.llama(**SIZES)
    broken.lm_head.weight.data[0] = math.nan
    assert choose_bos(make_engine(broken, []), SimpleNamespace(bos_token_id=0), window) is False


@pytest.mark.filterwarnings("ignore:.*ran out of memory")
def test_a_window_that_does_not_fit_is_one_line():
    model = tiny.llama(**SIZES)
    with (
        measuring.out_of_memory(model.model.norm, measuring.batch_above(0)),
        pytest.raises(UserError, match="a window of 12 tokens does not fit the memory of cpu"),
    ):
        perplexity(model, tokens_of(2, 12), progress=False)


@pytest.mark.fault("broken checkpoint")
def test_check_dense_is_silent_below_a_tenth_of_the_vocabulary_and_warns_from_there_in_one_line():
    assert check_dense(19.92, 49152, "text.txt") is None
    assert check_dense(4915.1, 49152, "text.txt") is None
    warning = check_dense(4915.2, 49152, "text.txt")
    assert "4915.2 on text.txt" in warning and "49152" in warning and "\n" not in warning


@pytest.mark.fault("broken checkpoint")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_check_dense_refuses_what_is_not_finite(value):
    with pytest.raises(UserError, match=f"perplexity {value} on text.txt"):
        check_dense(value, 49152, "text.txt")


WANDA = PruneConfig(method="wanda")


@pytest.mark.fault("damage")
@pytest.mark.parametrize(
    "dense, pruned, damaged",
    [
        (20.0, 79.9, False),
        (20.0, 80.0, True),  # four times the dense perplexity
        (1500.0, 4999.9, False),
        (1500.0, 5000.0, True),  # a tenth of the vocabulary
        (6000.0, 9000.0, False),  # the dense model was guessing already
        (20.0, math.inf, True),
        (20.0, math.nan, True),
        (math.inf, math.inf, False),  # nothing to compare with
    ],
)
def test_damage_is_four_times_the_perplexity_or_near_guessing(dense, pruned, damaged):
    assert (check_pruned({"text": (dense, pruned)}, 50000, WANDA) is not None) == damaged


@pytest.mark.fault("damage")
def test_the_warning_of_damage_is_one_line_with_the_worst_text_and_what_to_try():
    found = check_pruned({"a": (20.0, 30.0), "b": (21.3, 4091.0), "c": (10.0, 90.0)}, 49152, WANDA)
    assert found == (
        "pruning has damaged the model: perplexity 4091.0 on b, 192 times that of the dense model (21.3) "
        "(damaged: 2 of 3 texts); try a lower --sparsity, or --method fwanda --allocation auto"
    )
    assert "guessing among 1000 tokens" in check_pruned({"b": (21.3, 4091.0)}, 1000, WANDA)
    searched = PruneConfig(method="fwanda", allocation="response", pattern="1:4")
    assert check_pruned({"b": (2.0, 40.0)}, 1000, searched).endswith("; try a --pattern that keeps more")


def test_a_loss_that_was_not_finite_has_an_infinite_perplexity():
    assert [perplexity_of(loss) for loss in (0.0, None, 1e6)] == [1.0, math.inf, math.inf]
