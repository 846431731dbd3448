"""Text that the model draws from its own predictions: which tokens, in which batches, and what is refused."""

import json

import pytest
import tiny
import torch
import transformers
from interrupt import interrupted_after

from fwanda_pruner.cli import main
from fwanda_pruner.engine.losses import invert_distribution
from fwanda_pruner.errors import UserError
from fwanda_pruner.report.record import Report
from fwanda_pruner.run import stage as stages
from fwanda_pruner.text.own_text import sample_tokens, start_token_of

START = 1
BATCHES = 40  # windows that a CPU draws in three batches


def sampled(model, nsamples=5, seqlen=24, **settings):
    arguments = {"start_token": START, "seed": 3, "progress": False, **settings}
    return sample_tokens(model, nsamples=nsamples, seqlen=seqlen, **arguments)


@torch.no_grad()
def drawn_without_cache(model, nsamples=5, seqlen=24, seed=3):
    """What sampled() should be: each token from a forward pass over all tokens before it."""
    uniforms = torch.rand(nsamples, seqlen, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    ids = torch.full((nsamples, 1), START, device=model.device)
    uniforms = uniforms.to(model.device)
    for place in range(seqlen):
        probabilities = model(input_ids=ids, use_cache=False).logits[:, -1].float().softmax(-1)
        ids = torch.cat([ids, invert_distribution(probabilities, uniforms[:, place, None])[:, None]], dim=1)
    return ids[:, 1:].cpu()


@pytest.mark.filterwarnings("ignore:.*cannot use a static cache")
@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.EXPERTS])
def test_tokens_are_those_of_full_forward_passes(family):
    model = tiny.build(family)
    model.get_output_embeddings().register_forward_hook(lambda _m, _args, out: 0.5 * out)  # or Bloom repeats one token
    torch.testing.assert_close(sampled(model), drawn_without_cache(model), rtol=0, atol=0)


def test_tokens_stay_the_same_where_attention_reads_a_longer_part_of_the_cache():
    model = tiny.llama()
    torch.testing.assert_close(sampled(model, 2, 150), drawn_without_cache(model, 2, 150), rtol=0, atol=0)


def test_the_first_token_follows_the_prediction_after_the_start_token():
    model = tiny.llama()
    first = sampled(model, nsamples=4000, seqlen=2)[:, 0]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[START]])).logits[0, -1].softmax(-1)
    observed = torch.bincount(first, minlength=tiny.VOCABULARY) / len(first)
    assert 0.5 * (observed - expected).abs().sum() < 0.08
    assert first.unique().numel() > 20


def test_windows_depend_neither_on_the_batch_nor_on_how_many_are_drawn():
    model = tiny.llama()
    many = sampled(model, nsamples=BATCHES)
    assert torch.equal(many[:5], sampled(model, nsamples=5))
    assert torch.equal(many, drawn_without_cache(model, nsamples=BATCHES))
    assert not torch.equal(many, sampled(model, nsamples=BATCHES, seed=4))
    assert len(many.unique(dim=0)) == BATCHES


class Kept:
    """An `Unfinished` in memory that interrupts the run at its second save."""

    def __init__(self):
        self.state, self.saves = None, 0

    def load(self):
        return self.state

    def due(self):
        return True

    def save(self, tensors, values):
        self.state, self.saves = (tensors, values), self.saves + 1
        if self.saves == 2:
            raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_with_the_windows_that_are_left():
    model, kept, steps = tiny.llama(), Kept(), []
    with pytest.raises(KeyboardInterrupt):
        sampled(model, nsamples=BATCHES, unfinished=kept)
    done = len(kept.state[0]["tokens"])
    model.lm_head.register_forward_hook(lambda _m, args, _out: steps.append(len(args[0])))
    tokens = sampled(model, nsamples=BATCHES, unfinished=kept)
    assert 0 < done < BATCHES and len(steps) < 2 * 24
    assert torch.equal(tokens, drawn_without_cache(model, nsamples=BATCHES))


class Forgetful(transformers.LlamaForCausalLM):
    """Sees the last token alone if it is given a static cache."""

    def forward(self, *args, past_key_values=None, **kwargs):
        static = isinstance(past_key_values, transformers.StaticCache)
        return super().forward(*args, past_key_values=None if static else past_key_values, **kwargs)


class Refusing(transformers.LlamaForCausalLM):
    """Fails if it is given a static cache that holds a token."""

    def forward(self, *args, past_key_values=None, **kwargs):
        if isinstance(past_key_values, transformers.StaticCache) and past_key_values.get_seq_length() > 0:
            raise ValueError("no static cache here")
        return super().forward(*args, past_key_values=past_key_values, **kwargs)


@pytest.mark.parametrize(
    "kind, why", [(Forgetful, "the predictions with it are others"), (Refusing, "no static cache")]
)
def test_a_model_that_cannot_use_a_static_cache_is_drawn_from_without_it(kind, why):
    model = tiny.llama()
    broken = kind(model.config)
    broken.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match=f"{kind.__name__} cannot use a static cache, sampling is slower: {why}"):
        tokens = sampled(broken.eval())
    assert torch.equal(tokens, drawn_without_cache(model))


def test_sampling_leaves_the_model_as_it_was():
    model = tiny.llama().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    sampled(model)
    assert model.training and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.filterwarnings("ignore:.*cannot use a static cache")
@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.EXPERTS, "long llama"])
def test_tokens_are_those_of_full_forward_passes_on_gpu(family):
    """But for the few sequences in which rounding changes a token."""
    length = 150 if family == "long llama" else 24
    model = (tiny.llama() if family == "long llama" else tiny.build(family)).cuda()
    model.get_output_embeddings().register_forward_hook(lambda _m, _args, out: 0.5 * out)
    tokens, expected = sampled(model, 20, length), drawn_without_cache(model, 20, length)
    assert (tokens == expected).all(dim=1).sum() >= 18


@needs_gpu
def test_batches_are_smaller_where_memory_is_short_on_gpu():
    model = tiny.llama(hidden_size=512, num_attention_heads=8, num_key_value_heads=8).cuda()
    whole = sampled(model, 64, 512)
    torch.cuda.empty_cache()
    before, total = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]  # other tests may have left some
    torch.cuda.set_per_process_memory_fraction((before + (160 << 20)) / total)  # the cache of all 64 takes 256 MiB
    try:
        parts = sampled(model, 64, 512)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (whole[:, :16] == parts[:, :16]).all(dim=1).sum() >= 56


# Refusals


@pytest.mark.fault("not finite")
def test_predictions_that_are_not_finite_are_refused():
    model = tiny.llama()
    model.lm_head.register_forward_hook(lambda _m, _args, out: out * torch.inf)
    with pytest.raises(UserError, match="the model predicts NaN"):
        sampled(model)


def biased(strength):
    """A model that prefers token 7."""
    model = tiny.llama()
    bias = strength * (torch.arange(tiny.VOCABULARY) == 7)
    model.lm_head.register_forward_hook(lambda _m, _args, out: out + bias)
    return model


def test_text_that_repeats_one_token_is_refused():
    with pytest.raises(UserError, match="repeats itself: in 5 of 5 windows .* token 7.*--start-token"):
        sampled(biased(100.0))


def test_a_common_token_is_no_repetition():
    tokens = sampled(biased(2.0), nsamples=20)
    assert 0.05 < (tokens == 7).double().mean() < 0.5


def test_windows_beyond_the_table_of_positions_are_refused():
    with pytest.raises(UserError, match="use --seqlen 64"):
        sampled(tiny.build("gpt2"), seqlen=65)


# The start token


def words(*tokens, **special):
    """A tokenizer of whole words."""
    base = tiny.Tokenizer(tiny.models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    base.pre_tokenizer = tiny.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=base, **special)


@pytest.mark.parametrize(
    "tokenizer, bos, given, expected",
    [
        (tiny.tokenizer(), 5, None, 1),
        (words("a", "b", "<eot>", pad_token="<eot>"), 2, None, 2),
        (words("a", "b", "<|endoftext|>", eos_token="b"), 1, None, 1),
        (words("a", "b", "<|endoftext|>"), 1, None, 2),
        (None, 5, None, 5),
        (tiny.tokenizer(), 5, "9", 9),
        (tiny.tokenizer(), 5, 9, 9),
        (tiny.tokenizer(), 5, "w8", 8),
    ],
    ids=["tokenizer", "special", "special eos", "not special", "no tokenizer", "digits", "number", "word"],
)
def test_start_token(tokenizer, bos, given, expected):
    assert start_token_of(tiny.llama(bos_token_id=bos), tokenizer, given) == expected


@pytest.mark.parametrize(
    "tokenizer, given, message",
    [
        (words("a", "b"), None, "has no start token.* --start-token"),
        (None, None, "has no start token"),
        (words("a", "b"), "c", "must be a token of the tokenizer or the number of one, got 'c'"),
        (None, "a", "must be a token of the tokenizer"),
        (None, "64", r"in \[0, 64\), got 64"),
        (None, -1, r"in \[0, 64\), got -1"),
    ],
)
def test_start_token_that_is_missing_or_unknown_is_refused(tokenizer, given, message):
    with pytest.raises(UserError, match=message):
        start_token_of(tiny.llama(bos_token_id=None), tokenizer, given)


# fwanda sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample") / "model"
    tiny.llama().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def argv(folder, tmp_path):
    numbers = ["--nsamples", str(BATCHES), "--seqlen", "24", "--seed", "3", "--device", "cpu"]
    return ["sample", str(folder), *numbers, "--output", str(tmp_path / "own.jsonl")]


def last_line(capsys):
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_the_command_writes_one_window_a_line(argv, folder, tmp_path, capsys):
    assert main(argv) == 0
    lines = [json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    tokens = [tiny.tokenizer()(line["text"], add_special_tokens=False).input_ids for line in lines]
    assert torch.equal(torch.tensor(tokens), sampled(tiny.llama(), nsamples=BATCHES))
    assert [line["window"] for line in lines] == list(range(BATCHES)) and {line["seed"] for line in lines} == {3}
    assert {path.name for path in tmp_path.iterdir()} == {"own.jsonl"}
    out = capsys.readouterr().out
    assert "for 40 windows of 24 tokens" in out and "energy      not measured" in out
    command = next(line for line in out.splitlines() if line.startswith("next: ")).split()[2:]
    command[command.index("DIR")] = str(tmp_path / "pruned")
    assert main([*command, "--device", "cpu", "--method", "wanda"]) == 0
    domain = Report.load(tmp_path / "pruned").domains[0]
    assert (domain["source"], domain["unread"], domain["windows"]) == (str(tmp_path / "own.jsonl"), True, 8)


@pytest.mark.fault("Ctrl-C")
@pytest.mark.fault("long run dies")
@pytest.mark.parametrize("kept", ["sample-part", "sample"])
def test_an_interrupted_command_goes_on_with_resume(argv, kept, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stages, "SAVE_SECONDS", 0)
    assert main(argv) == 0
    expected = (tmp_path / "own.jsonl").read_bytes()
    (tmp_path / "own.jsonl").unlink()
    with interrupted_after(kept):
        assert main(argv) == 130
    assert last_line(capsys) == "fwanda: interrupted; continue with the same command and --resume"
    assert not (tmp_path / "own.jsonl").exists()
    assert main([*argv, "--seed", "4", "--resume"]) == 2
    assert "the interrupted run had seed 3, this one has 4" in last_line(capsys)
    assert main([*argv, "--resume"]) == 0
    assert (tmp_path / "own.jsonl").read_bytes() == expected
    assert {path.name for path in tmp_path.iterdir()} == {"own.jsonl"}


def test_the_command_replaces_its_own_file_and_no_other(argv, tmp_path, capsys):
    assert main(argv) == 0 and main([*argv, "--seed", "4"]) == 0
    assert json.loads((tmp_path / "own.jsonl").read_text().splitlines()[0])["seed"] == 4
    for content in ('{"text": "a corpus"}\n', "not JSON", ""):
        (tmp_path / "own.jsonl").write_text(content)
        assert main(argv) == 2 and "was not written by fwanda sample" in last_line(capsys)
        assert (tmp_path / "own.jsonl").read_text() == content


@pytest.mark.fault("changed output")
def test_resume_of_a_finished_file_says_so_and_refuses_other_settings(argv, folder, tmp_path, capsys):
    assert main(argv) == 0
    written = (tmp_path / "own.jsonl").read_bytes()
    capsys.readouterr()
    assert main([*argv, "--resume"]) == 0
    assert capsys.readouterr().out.startswith("finished    ")
    for flag, value in (("--seed", "4"), ("--seqlen", "25"), ("--nsamples", "4"), ("--dtype", "bfloat16")):
        assert main([*argv, flag, value, "--resume"]) == 2
        assert f"is finished with {flag[2:]}" in last_line(capsys)
    (tmp_path / "own.jsonl").write_bytes(written[:-9])
    assert main([*argv, "--resume"]) == 2 and "has changed since it was written" in last_line(capsys)
    assert (tmp_path / "own.jsonl").read_bytes() == written[:-9]


@pytest.mark.fault("Ctrl-C")
def test_resume_goes_on_where_an_older_file_was_to_be_replaced(argv, tmp_path, capsys):
    assert main(argv) == 0
    with interrupted_after("sample"):
        assert main([*argv, "--seed", "4"]) == 130
    assert main([*argv, "--seed", "4", "--resume"]) == 0
    assert json.loads((tmp_path / "own.jsonl").read_text().splitlines()[0])["seed"] == 4


@pytest.mark.parametrize(
    "extra, message",
    [
        (["--output", "own.txt"], "--output must be a .jsonl file"),
        (["--output", "missing/own.jsonl"], "in an existing, writable folder"),
        (["--start-token", "nothing"], "got 'nothing'"),
        (["--nsamples", "0"], "--nsamples must be an integer"),
        (["--max-memory", "1GiB"], "--max-memory limits the memory of a GPU"),
    ],
)
def test_a_mistake_is_one_line(argv, extra, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*argv, *extra]) == 2
    assert message in last_line(capsys) and not list(tmp_path.iterdir())


def test_a_model_without_tokenizer_is_refused(argv, folder, tmp_path, capsys):
    tiny.llama().save_pretrained(tmp_path / "bare")
    argv[1] = str(tmp_path / "bare")
    assert main(argv) == 2 and "no tokenizer" in last_line(capsys)
