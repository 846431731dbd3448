"""Arguments that are True or False, or one of a few words, in every public function: arrays and tensors are refused."""

import copy

import numpy as np
import pytest
import tiny
import torch

from fwanda_pruner import (
    PruneConfig,
    RunState,
    Statistics,
    UserError,
    collect,
    evaluate_model,
    evaluate_tasks,
    load_model,
    load_packed,
    pack_,
    prune,
    save_pruned,
)
from fwanda_pruner.integrations import nn_prune, wanda_style

TEXT = tiny.tokens(16, 24)
ARRAYS = {
    "array": np.array([1, 0]),
    "no dimensions": np.array(0.5),
    "array of one": np.array([True]),
    "empty array": np.array([]),
    "array of objects": np.array([None, "a"], object),
    "tensor": torch.tensor([1, 0]),
    "tensor of one": torch.tensor(True),
    "meta": torch.tensor([1, 0], device="meta"),
    "sparse": torch.eye(2).to_sparse(),
    "record": np.zeros(1, dtype=[("a", int)])[0],
    "no time": np.timedelta64("NaT"),
}
QUIET = {"calibration": TEXT, "guard": "none", "method": "wanda", "progress": False}


@pytest.fixture(scope="module")
def pruned():
    model = tiny.llama()
    return model, prune(model, **QUIET)


def one_line(call, message: str) -> None:
    with pytest.raises(UserError) as error:
        call()
    text = str(error.value)
    assert text.startswith(message) and "\n" not in text and len(text) < 300, text


@pytest.mark.fault("array for a flag")
@pytest.mark.parametrize("kind", ARRAYS)
def test_every_flag_of_every_function_takes_true_and_false_alone(kind, pruned, tmp_path):
    model, report = pruned
    value = ARRAYS[kind]
    calls = {
        "progress": [
            lambda: prune(tiny.llama(), **{**QUIET, "progress": value}),
            lambda: collect(tiny.llama(), calibration=TEXT, progress=value),
            lambda: evaluate_model(tiny.llama(), eval=TEXT, progress=value),
            lambda: evaluate_tasks(tiny.llama(), tiny.tokenizer(), ["rte"], progress=value),
        ],
        "force": [lambda: pack_(copy.deepcopy(model), force=value)],
        "overwrite": [
            lambda: save_pruned(model, None, report, tmp_path / "out", overwrite=value),
            lambda: RunState(tmp_path / "out", overwrite=value),
        ],
        "resume": [lambda: RunState(tmp_path / "out", resume=value)],
        "allow_pickle": [lambda: load_model("smollm2", device="cpu", allow_pickle=value)],
        "offload": [lambda: load_model("smollm2", device="cpu", offload=value)],
        "trust_remote_code": [
            lambda: load_model("smollm2", device="cpu", trust_remote_code=value),
            lambda: load_packed(tmp_path, device="cpu", trust_remote_code=value),
        ],
        "--deterministic must be true or false, got": [lambda: prune(tiny.llama(), **QUIET, deterministic=value)],
        "--no-check must be true or false, got": [lambda: PruneConfig(no_check=value)],
        "--offload must be true or false, got": [lambda: PruneConfig(offload=value)],
    }
    for name, those in calls.items():
        for call in those:
            one_line(call, name if name.startswith("--") else f"{name} must be True or False, got ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("array for a flag")
@pytest.mark.parametrize("kind", ARRAYS)
def test_settings_of_a_few_words_or_numbers_take_no_array(kind):
    value = ARRAYS[kind]
    for name in ("method", "allocation", "order", "fisher", "bos", "dtype", "engine", "compile", "energy", "save"):
        one_line(lambda name=name: PruneConfig(**{name: value}), f"--{name} must be one of ")
    for name in ("sparsity", "power", "nsamples", "eval_windows", "micro_batch"):
        one_line(lambda name=name: PruneConfig(**{name: value}), f"--{name.replace('_', '-')} must be ")
    one_line(lambda: load_model("smollm2", device=value), "device must be auto, cpu, cuda or cuda:N, got ")
    one_line(lambda: load_model("smollm2", device="cpu", dtype=value), "dtype must be one of ")
    one_line(lambda: load_model("smollm2", device="cpu", engine=value), "engine must be one of ")
    one_line(lambda: load_model("smollm2", device="cpu", max_bytes=value), "max_bytes must be a number of bytes")


@pytest.mark.fault("array for a flag")
@pytest.mark.parametrize("kind", ARRAYS)
def test_paths_names_and_numbers_of_other_functions_take_no_array(kind):
    value, statistics = ARRAYS[kind], Statistics()
    weight, scaler_row, layer = torch.ones(2, 4), torch.ones(4), torch.nn.Linear(4, 2)
    one_line(lambda: RunState(value), "output must be a path, got ")
    one_line(lambda: statistics.save(value), "path must be a path, got ")
    one_line(lambda: statistics.to(value), "device must be auto, cpu, cuda or cuda:N, got ")
    one_line(lambda: statistics.layer(value), "name must be that of a matrix of the statistics, got ")
    one_line(lambda: wanda_style.wanda_mask(weight, scaler_row, value), "sparsity_ratio must be a finite number, got ")
    one_line(lambda: wanda_style.wanda_mask(weight, scaler_row, 0.5, value, 4), "prune_n must be an integer, got ")
    one_line(lambda: nn_prune.wanda_unstructured(layer, "weight", value, 0.5), "statistics must be a LayerStatistics")
    one_line(lambda: nn_prune.global_fwanda_unstructured(value, {}, 0.5), "parameters must be ")


@pytest.mark.fault("array for a flag")
def test_a_bool_of_numpy_is_a_bool(tmp_path):
    assert PruneConfig(no_check=np.bool_(True)).no_check is True
    report = prune(tiny.llama(), **{**QUIET, "progress": np.bool_(False), "deterministic": np.False_})
    assert report.config["deterministic"] is False


@pytest.mark.parametrize("path", ["/", "a\nb", "\ud800", "x" * 300], ids=["root", "line", "surrogate", "long"])
def test_a_state_beside_an_output_that_cannot_be_is_one_line(path):
    one_line(lambda: RunState(path), "output ")
