"""Ranks that share the weights: the bits of ranks that each have all of them, and few blocks in memory."""

import json
from pathlib import Path

import pytest
import shard_worker
import tiny
import torch
import transformers
from helpers_cli import arguments, make_folder
from helpers_ranks import Launcher, torchrun
from packaging.version import Version
from safetensors.torch import load_file
from test_torchrun import own_lines
from transformers import AutoModelForCausalLM

import fwanda_pruner
from fwanda_pruner.errors import UserError
from fwanda_pruner.formats.audit import stored_tensors
from fwanda_pruner.model.place import fitting_engine
from fwanda_pruner.model.sharding import shard_

SIZES = (2, 3)
GIB = 2**30


@pytest.fixture(scope="module")
def launcher():
    with Launcher() as running:
        yield running


@pytest.fixture(scope="module")
def folders(tmp_path_factory, launcher) -> dict[int, Path]:
    """Number of ranks -> the folder with what each rank found, and with saved models."""
    base, found = tmp_path_factory.mktemp("sharded"), {}
    for size in SIZES:
        found[size] = base / str(size)
        done = launcher.run(size, found[size], worker="shard_worker")
        assert done.codes == [0] * size, done.stderr
    return found


@pytest.fixture(scope="module")
def found(folders) -> dict[int, list[dict]]:
    """Number of ranks -> what each rank found."""
    return {s: [json.loads((path / f"{rank}.json").read_text()) for rank in range(s)] for s, path in folders.items()}


@pytest.mark.parametrize("name", shard_worker.RUNS)
def test_pruned_weights_and_records_are_those_of_resident_ranks(found, name):
    expected = found[2][0]["resident"][name]
    assert expected["engine"] == "resident"
    for size in SIZES if name in shard_worker.ON_THREE else (2,):
        first, *others = (rank["sharded"][name] for rank in found[size])
        assert (first["engine"], first["ranks"]) == ("sharded", size)
        assert first["facts"] == expected["facts"] and all(other["facts"] == first["facts"] for other in others)
        assert first["weights"] == expected["weights"]


def test_statistics_have_the_bits_of_resident_ranks(found):
    assert all(set(rank["statistics"].values()) == {True} for size in SIZES for rank in found[size])


def test_other_functions_give_what_they_give_for_resident_ranks(found):
    same = dict.fromkeys(("evaluate_model", "collect", "masks"), True)
    assert all(rank["other calls"] == same for size in SIZES for rank in found[size])


def test_at_most_two_blocks_are_whole_at_a_time_and_none_at_the_end(found):
    for size in SIZES:
        for rank in found[size]:
            *during, after = rank["whole blocks"]
            assert max(during) <= 2 and len(during) > 50 and after == 0


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("size", SIZES)
def test_saved_files_are_those_of_the_resident_engine(folders, size, name):
    saved = folders[size] / "saved"
    expected = saved / f"{name} resident"
    assert sorted(path.name for path in (saved / f"{name} sharded").iterdir()) == sorted(
        path.name for path in expected.iterdir()
    )
    for file in ("model.safetensors", "config.json", "generation_config.json"):
        assert (saved / f"{name} sharded" / file).read_bytes() == (expected / file).read_bytes()
    whole = load_file(expected / "model.safetensors")
    files = stored_tensors(saved / f"{name} in files")
    assert len(set(files.values())) > 1 and files.keys() == whole.keys()
    loaded = AutoModelForCausalLM.from_pretrained(saved / f"{name} in files")
    plain = AutoModelForCausalLM.from_pretrained(expected)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), plain.parameters(), strict=True))
    tied = [model.lm_head.weight is model.model.embed_tokens.weight for model in (loaded, plain)]
    assert tied == [name == "llama"] * 2
    assert min(int((tensor == 0).sum()) for key, tensor in whole.items() if "experts" in key or "up_proj" in key) > 0


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="this transformers reads no shares")
@pytest.mark.skipif(torch.accelerator.current_accelerator() is not None, reason="this torch reads shares onto GPUs")
def test_shares_can_be_read_with_this_transformers(found):
    assert all(rank["can read shares"] for size in SIZES for rank in found[size])


def test_what_does_not_work_is_one_line(found):
    says = {
        "self": "the model writes no text with --engine sharded",
        "resident": "load the model with --engine resident",
        "streamed": "load the model with --engine streamed",
        "packed": "a sharded model is saved in the form dense",
        "plain": "load_model(name, engine='sharded')",
        "offload": "--offload keeps weights in RAM instead of on GPUs",
        "tasks": "the decoder blocks are divided over ranks; load the model by load_model(name, engine='resident')",
        "memory": "cpu ran out of memory; use a smaller --micro-batch, --checkpointing on",
    }
    for size in SIZES:
        for rank in found[size]:
            assert rank["refusals"].keys() == says.keys()
            assert all(words in rank["refusals"][name] for name, words in says.items())


def test_one_process_is_refused():
    with pytest.raises(UserError, match="over several ranks, got one process; start it by torchrun"):
        shard_(tiny.llama(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("weights", "memory", "ranks", "engine"),
    [(60, 80, 8, "resident"), (60, 70, 1, "streamed"), (60, 70, 2, "sharded"), (600, 80, 8, "streamed")],
)
def test_auto_chooses_by_memory_and_ranks(weights, memory, ranks, engine):
    assert fitting_engine(weights * GIB, memory * GIB, ranks) == engine


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "sharded", "segment": 2}, "--segment has no effect with --engine sharded"),
        ({"engine": "sharded", "compile": "on"}, "--compile on has no effect with --engine sharded"),
        ({"engine": "sharded", "calibration": ("self",)}, "--calibration self does not work with --engine sharded"),
        ({"engine": "sharded", "save": "packed"}, "--save packed needs the whole model"),
        ({"engine": "streamed", "offload": True}, "--offload has no effect with --engine streamed"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(UserError, match=message):
        fwanda_pruner.PruneConfig(**settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def command_of(folder: Path, out: Path, engine: str) -> list[str]:
    return arguments(folder, out, "--engine", engine, "--eval", str(folder / "eval.txt"), method="fsparsegpt")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("method", ["fwanda", "fsparsegpt"])
def test_two_gpus_give_the_bits_of_resident_ranks_on_gpu(folder, tmp_path, method):
    fixed = ["--device", "auto", "--deterministic", "--micro-batch", "4", "--compile", "off"]
    written = []
    for engine in (["resident"], ["sharded"], ["sharded", "--offload"]):
        out = tmp_path / "-".join(engine)
        done = torchrun(2, *arguments(folder, out, "--engine", *engine, method=method), *fixed)
        assert done.returncode == 0, done.stderr
        written.append((out / "model.safetensors").read_bytes())
    assert written[0] == written[1] == written[2]


@pytest.fixture(scope="module")
def whole(folder, launcher) -> bytes:
    """The weights that one resident rank writes."""
    done = launcher.run(1, folder / "streams", command_of(folder, folder / "whole", "resident"))
    assert done.codes == [0], done.stderr
    return (folder / "whole" / "model.safetensors").read_bytes()


@pytest.mark.fault("rank fails")
@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ((1, "calibrate", "kill"), "rank 1 of 2 was killed, perhaps because memory ran out, so all ranks stop"),
        ((0, "eval_pruned", "kill"), "rank 0 of 2 was killed, perhaps because memory ran out, so all ranks stop"),
        ((1, "save", "kill"), "rank 1 of 2 was killed, perhaps because memory ran out, so all ranks stop"),
        ((1, "prune", "memory"), "rank 1 of 2: CUDA out of memory; use a smaller --micro-batch"),
    ],
)
def test_a_rank_that_fails_ends_all_with_one_line_and_the_run_resumes_on_more_ranks(
    folder, tmp_path, launcher, whole, fault, line
):
    command = command_of(folder, tmp_path / "out", "sharded")
    done = launcher.run(2, tmp_path / "streams", command, fault)
    assert all(done.codes)
    (error,) = [text for text in own_lines(done.stderr) if text.startswith("fwanda")]
    assert error.startswith(f"fwanda: error: {line}")
    assert not (tmp_path / "out").exists()
    done = launcher.run(3, tmp_path / "streams again", [*command, "--resume"])
    assert not any(done.codes), done.stderr
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == whole
    record = json.loads((tmp_path / "out" / "fwanda.json").read_text())
    assert (record["engine"], record["ranks"]) == ("sharded", 3)
