"""Settings and texts as Python code gives them: paths, exact fractions, numbers of numpy, token ids."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import yaml
from safetensors.torch import save_file

import fwanda_pruner
from fwanda_pruner import PruneConfig, Statistics, UserError, load_model
from fwanda_pruner.cli import main

LENGTH = 24


def prune(model=None, **settings):
    settings = {"method": "wanda", "guard": "none", "progress": False, **settings}
    return fwanda_pruner.prune(model or tiny.llama(), tiny.tokenizer(), **settings)


# Settings


@pytest.mark.fault("value of Python")
@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("sparsity", Fraction(1, 2), "1/2"),
        ("sparsity", Fraction(1, 3), "1/3"),
        ("sparsity", Decimal("0.70"), "0.70"),
        ("sparsity", Decimal("7E-1"), "0.7"),
        ("sparsity", 0.7, "0.7"),
        ("sparsity", np.float32(0.7), "0.7"),
        ("sparsity", np.float64(0.7), "0.7"),
        ("sparsity", np.int64(0), "0"),
        ("nsamples", np.int32(20), 20),
        ("seed", np.uint64(2**62), 2**62),
        ("power", Fraction(1, 2), 0.5),
        ("power", Decimal("0.5"), 0.5),
        ("power", np.float16(0.5), 0.5),
        ("power", np.int64(1), 1.0),
        ("micro_batch", np.int64(4), "4"),
        ("fisher_samples", 8, "8"),
        ("start_token", np.int16(7), "7"),
        ("calibration", Path("a/b.txt"), ("a/b.txt",)),
        ("calibration", [Path("a.txt"), "b:2"], ("a.txt", "b:2")),
        ("eval", ("a", Path("b.txt")), ("a", "b.txt")),
        ("guard", Path("b.txt"), ("b.txt",)),
        ("include", ["*.mlp.*"], ("*.mlp.*",)),
    ],
    ids=str,
)
def test_values_of_python_become_plain_and_survive_files(name, value, expected, tmp_path):
    config = PruneConfig(**{name: value})
    assert getattr(config, name) == expected and type(getattr(config, name)) is type(expected)
    assert PruneConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(config.to_dict()))
    assert PruneConfig.load(tmp_path / "a.yaml") == config


@pytest.mark.fault("value of Python")
@pytest.mark.parametrize(
    "name, value, message",
    [
        ("sparsity", torch.tensor(0.5), "--sparsity must be a number or text, got tensor"),
        ("sparsity", True, "--sparsity must be a number or text, got True"),
        ("sparsity", Fraction(3, 2), "--sparsity must be in [0, 1), such as 0.5 for 50 %, got '3/2'"),
        ("sparsity", Decimal("nan"), "--sparsity must be in [0, 1), such as 0.5 for 50 %, got 'nan'"),
        ("sparsity", Fraction(1, 10**6000), "--sparsity must be in [0, 1)"),
        ("power", Decimal("sNaN"), "--power must be a number in [0, 4]"),
        ("power", 10**400, "--power must be a number in [0, 4]"),
        ("nsamples", np.float64(8), "--nsamples must be an integer in [1, 1000000], got"),
        ("pattern", Fraction(1, 2), "--pattern must be text, got Fraction(1, 2)"),
        ("calibration", {"a"}, "--calibration must be a list of texts, got {'a'}; token ids are a torch tensor [S, L]"),
        ("calibration", np.zeros((2, 8), int), "token ids are a torch tensor [S, L] of integers"),
        ("calibration", [[1, 2]], "token ids are a torch tensor [S, L] of integers"),
        ("eval", 3, "--eval must be a list of texts, got 3; token ids are"),
        ("guard", torch.zeros(2, 8), "--guard must be a list of texts, got tensor"),
        ("calibration", "one\ntwo", "write raw text to a .txt file and name that file"),
    ],
    ids=range(15),
)
def test_other_values_are_refused_in_one_line(name, value, message):
    with pytest.raises(UserError) as error:
        PruneConfig(**{name: value})
    text = str(error.value)
    assert message in text and "\n" not in text and len(text) < 300


@pytest.mark.fault("value of Python")
@pytest.mark.parametrize("sparsity", [Fraction(1, 3), Fraction(5, 7), Decimal("0.3"), np.float32(0.3)], ids=str)
def test_a_fraction_is_removed_exactly(sparsity):
    exact = Fraction(3, 10) if not isinstance(sparsity, Fraction) else sparsity
    report = prune(calibration=tiny.tokens(16, LENGTH), sparsity=sparsity)
    for row in report.matrices:
        rows, columns = row.shape
        assert row.kept == rows * (columns - int(exact * columns)) and row.numel - row.kept == row.zeros


@pytest.mark.fault("value of Python")
def test_texts_may_be_paths_and_tuples(tmp_path):
    text, guard = Path(tiny.text_file(tmp_path)), Path(tiny.guard_file(tmp_path))
    settings = {"nsamples": 20, "seqlen": LENGTH, "bos": "none"}
    one = prune(calibration=(text, guard), eval=[guard, tiny.tokens(2, LENGTH)], **settings)
    two = prune(calibration=[str(text), str(guard)], eval=(str(guard), tiny.tokens(2, LENGTH)), **settings)
    assert one.config == two.config and one.tokens_sha256 == two.tokens_sha256 and one.perplexity == two.perplexity
    assert [entry["source"] for entry in one.perplexity] == [str(guard), "tokens"]
    json.dumps(one.to_dict())


@pytest.mark.fault("name of a text")
@pytest.mark.parametrize("argument", ["calibration", "guard", "eval"])
def test_raw_texts_are_refused_with_what_to_do(argument):
    with pytest.raises(UserError, match=f"--{argument} 'A text.': neither a file .* write it to a .txt file"):
        prune(**{"calibration": "sample", "nsamples": 16, "seqlen": LENGTH, argument: ["A text.", "And another one."]})


# Settings without effect


def warnings_of(**settings) -> list[str]:
    lines = prune(calibration=tiny.tokens(20, LENGTH), **settings).warnings
    return [line for line in lines if "no effect" in line]


@pytest.mark.fault("unused setting")
@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, []),
        ({"nsamples": 20, "seqlen": LENGTH}, []),
        ({"nsamples": 128}, ["--nsamples 128 has no effect: the token ids are of --nsamples 20"]),
        ({"nsamples": 8}, ["--nsamples 8 has no effect: the token ids are of --nsamples 20"]),
        ({"config": PruneConfig(method="wanda", guard="none")}, []),
        (
            {"config": PruneConfig(method="wanda", guard="none", seqlen=12)},
            [f"--seqlen 12 has no effect: the token ids are of --seqlen {LENGTH}"],
        ),
        (
            {"eval": tiny.tokens(3, LENGTH), "eval_seqlen": 8, "eval_windows": 2},
            [
                f"--eval-seqlen 8 has no effect: the token ids are of --eval-seqlen {LENGTH}",
                "--eval-windows 2 has no effect: the token ids are of --eval-windows 3",
            ],
        ),
        ({"device": "cpu", "dtype": "float32"}, []),
        ({"device": "cuda"}, ["--device cuda has no effect: the model is on cpu; move it by model.to()"]),
        (
            {"config": PruneConfig(method="wanda", guard="none", dtype="bfloat16")},
            ["--dtype bfloat16 has no effect: the weights are float32; convert them by model.to()"],
        ),
        ({"start_token": 5}, ["--start-token has no effect without --calibration self or --guard self"]),
    ],
    ids=range(11),
)
def test_settings_without_effect_are_named(settings, expected):
    if "config" not in settings:
        assert warnings_of(**settings) == expected
        return
    report = fwanda_pruner.prune(tiny.llama(), calibration=tiny.tokens(20, LENGTH), progress=False, **settings)
    assert [line for line in report.warnings if "no effect" in line] == expected


@pytest.mark.fault("unused setting")
@pytest.mark.parametrize("device", ["banana", "mps:x", "", "meta"])
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(UserError, match="device must be auto, cpu, cuda or cuda:N, got "):
        prune(device=device)


@pytest.mark.fault("unused setting")
@pytest.mark.parametrize("same", [True, False])
def test_token_ids_are_compared_with_the_statistics_where_no_text_runs(same):
    ids, others = tiny.tokens(16, LENGTH), tiny.tokens(16, LENGTH, seed=1)
    statistics = fwanda_pruner.collect(tiny.llama(), config=PruneConfig(), calibration=ids, progress=False)
    report = prune(calibration=ids if same else others, statistics=statistics, method="wanda")
    said = "the statistics were measured on another text than --calibration"
    assert report.warnings.count(said) == (not same)


@pytest.mark.fault("statistics file")
@pytest.mark.parametrize("text", [{}, {"calibration": ["tokens"], "nsamples": 16}])
def test_a_statistics_file_that_does_not_say_its_text_is_refused(text, tmp_path):
    ids = tiny.tokens(16, LENGTH)
    statistics = fwanda_pruner.collect(tiny.llama(), config=PruneConfig(), calibration=ids, progress=False)
    tensors, values = replace(statistics, text=text).to_parts()
    save_file(tensors, tmp_path / "a.safetensors", metadata={"fwanda": json.dumps(values)})
    with pytest.raises(UserError, match="not a statistics file"):
        Statistics.load(tmp_path / "a.safetensors")


# On the command line


@pytest.mark.fault("name of a text")
@pytest.mark.parametrize(
    "flags, message",
    [
        (["--guard", "code:2"], "--guard 'code:2': only calibration texts take a share; write 'code'"),
        (["--calibration", "sample,code"], "--calibration 'sample,code': no such file; to name several texts, repeat"),
        (["--eval", "missing.txt"], "--eval missing.txt: no such file"),
        (["--calibration", "none/at:3", "--calibration", "A b"], "--calibration 'A b': neither a file nor"),
    ],
    ids=str,
)
def test_a_name_of_no_text_is_refused_before_the_model_is_read(flags, message, tmp_path, capsys, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["a"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_args, **_options: rows)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("not read")
    assert main(["prune", str(tmp_path / "model"), "--output", str(tmp_path / "out"), *flags]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and message in error[0]


# Statistics and paths


def statistics() -> Statistics:
    return fwanda_pruner.collect(tiny.llama(blocks=1), calibration=tiny.tokens(16, LENGTH), progress=False)


NO_SUMS = {
    "None": None,
    "list": [1.0] * 8,
    "meta": torch.ones(8, device="meta"),
    "sparse": torch.ones(8).to_sparse(),
    "nested": torch.nested.nested_tensor([torch.ones(8)]),
}


@pytest.mark.fault("statistics file")
@pytest.mark.parametrize("table", ["x2", "g2"])
@pytest.mark.parametrize("value", NO_SUMS)
def test_sums_that_python_replaced_by_no_tensor_are_one_line_everywhere(value, table, tmp_path):
    changed = statistics()
    getattr(changed, table)[next(iter(changed.x2))] = NO_SUMS[value]
    for call in (
        lambda: changed.save(tmp_path / "a.safetensors"),
        lambda: changed.to("cpu"),
        changed.fingerprint,
        lambda: prune(tiny.llama(blocks=1), statistics=changed),
    ):
        with pytest.raises(UserError, match=rf"^{table}\[.*\] of the statistics must be a dense tensor, got") as error:
            call()
        assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.fault("statistics file")
@pytest.mark.parametrize(
    "change",
    [
        {"text": 5.0},
        {"text": {"seed": 0}},
        {"text": None},
        {"fisher_tokens": "x"},
        {"n_tokens": None},
        {"bos": "yes"},
        {"passes": 3},
        {"fisher": 1},
    ],
    ids=str,
)
def test_values_of_statistics_that_no_run_has_written_are_one_line(change, tmp_path):
    changed = replace(statistics(), **change)
    for call in (
        lambda: changed.save(tmp_path / "a.safetensors"),
        lambda: prune(tiny.llama(blocks=1), statistics=changed),
    ):
        with pytest.raises(UserError, match="^the statistics are not as collect.. measures them: ") as error:
            call()
        assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.fault("statistics file")
def test_tables_and_empty_statistics_are_one_line(tmp_path):
    with pytest.raises(UserError, match="^x2 of the statistics must be a dict of tensors, got None"):
        Statistics(x2=None).fingerprint()
    assert len(Statistics().fingerprint()) == 64
    with pytest.raises(UserError, match="^the statistics are not as collect"):
        Statistics().save(tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.fault("statistics file")
def test_sums_that_share_memory_or_have_strides_are_saved(tmp_path):
    shared, (first, second, *_) = statistics(), statistics().x2
    shared.x2[second] = shared.x2[first] = torch.arange(16.0)[::2]
    shared.save(tmp_path / "a.safetensors")
    loaded = Statistics.load(tmp_path / "a.safetensors")
    assert loaded.x2[first].tolist() == loaded.x2[second].tolist() == list(range(0, 16, 2))


@pytest.mark.fault("statistics file")
def test_a_folder_as_the_file_of_statistics_is_one_line(tmp_path):
    for path in ("/", tmp_path, f"{tmp_path}/"):
        with pytest.raises(UserError, match="is a folder; give the name of a file in it$"):
            statistics().save(path)


@pytest.mark.fault("name of a text")
@pytest.mark.parametrize("load", [PruneConfig.load, Statistics.load])
@pytest.mark.parametrize("path", ["a\nb", "a" * 5000, "b/" * 2500, "c\0d"], ids=["line", "long", "deep", "null"])
def test_odd_paths_are_named_shortly_on_one_line(load, path):
    with pytest.raises(UserError) as error:
        load(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.fault("huge number")
@pytest.mark.parametrize("device", [10**30, -(10**30), 10**5000, 2**63], ids=["30", "-30", "5000", "63"])
def test_a_device_of_a_huge_number_is_one_line(device):
    with pytest.raises(UserError, match="^device must be auto, cpu, cuda or cuda:N, got"):
        statistics().to(device)


@pytest.mark.fault("value of Python")
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:9", torch.device("cuda:9")], ids=str)
def test_a_device_that_this_machine_lacks_is_one_line_that_names_it(device):
    with pytest.raises(UserError, match=f"^device '{device}': torch finds 0 CUDA devices here; use cpu or auto$"):
        statistics().to(device)


@pytest.mark.fault("odd config")
def test_a_matrix_without_a_weight_is_one_line():
    model = tiny.llama()
    model.model.layers[0].mlp.up_proj.weight = None
    with pytest.raises(UserError, match="up_proj") as error:
        prune(model, calibration=tiny.tokens(16, LENGTH))
    assert "\n" not in str(error.value)


@pytest.mark.fault("threads")
def test_threads_that_load_models_at_once_all_get_theirs(tmp_path):
    tiny.llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        models = [load.result().model for load in [pool.submit(load_model, tmp_path, device="cpu") for _ in range(4)]]
    assert all(torch.equal(model.lm_head.weight, models[0].model.embed_tokens.weight) for model in models)
