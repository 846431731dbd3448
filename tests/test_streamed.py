"""The streamed engine gives the bits of the resident one, with few blocks in memory."""

import json
import os
import re
import threading
import weakref
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from measuring import engine_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fwanda_pruner
from fwanda_pruner.cli import main
from fwanda_pruner.engine import memory
from fwanda_pruner.engine.all_weights import fingerprint
from fwanda_pruner.engine.block_inputs import kept_away
from fwanda_pruner.engine.engine import make_engine
from fwanda_pruner.engine.loop import PassSettings
from fwanda_pruner.engine.resident import ResidentEngine
from fwanda_pruner.engine.streamed import StreamedEngine
from fwanda_pruner.engine.sums import Sums
from fwanda_pruner.errors import UserError
from fwanda_pruner.evaluate.lm_eval_tasks import evaluate_tasks
from fwanda_pruner.measure.statistics import measure_statistics
from fwanda_pruner.model.placement import blocks_lie_apart
from fwanda_pruner.model.targets import find_blocks, find_targets

BLOCKS = 4
aten = torch.ops.aten


def streamed(model, segment: int, **settings) -> StreamedEngine:
    settings = PassSettings(**settings)
    return StreamedEngine(model, find_targets(model)[0], settings, segment=segment, progress=False)


def assert_same(model, expected) -> None:
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other), name


def assert_same_statistics(statistics, expected) -> None:
    assert statistics.n_tokens == expected.n_tokens and any(g.any() for g in expected.g2.values())
    for kind in ("x2", "g2"):
        for name, tensor in getattr(expected, kind).items():
            assert torch.equal(getattr(statistics, kind)[name], tensor), f"{name}.{kind}"


class OnlyCopied(TorchDispatchMode):
    """Fails where an operation other than a copy takes a weight that is not loaded: on a GPU, it could not."""

    def __init__(self, model):
        self._homes = {p.untyped_storage().data_ptr() for p in find_blocks(model)[1].parameters()}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if any(tensor.untyped_storage().data_ptr() in self._homes for tensor in tensors):
            aliases = [output.alias_info for output in operation._schema.returns]
            view = all(alias is not None and not alias.is_write for alias in aliases)
            assert view or operation in (aten.clone.default, aten.copy_.default, aten.is_pinned.default), operation
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("fisher", ["empirical", "true", "mean"])
@pytest.mark.parametrize("segment", [1, 2, BLOCKS])
def test_statistics(segment, fisher):
    expected = measure_statistics(engine_of(tiny.llama(blocks=BLOCKS), micro_batch=2), tiny.TEXT, fisher=fisher)
    engine = streamed(tiny.llama(blocks=BLOCKS), segment, micro_batch=2)
    assert_same_statistics(measure_statistics(engine, tiny.TEXT, fisher=fisher), expected)
    assert engine.weights.most_loaded == segment


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.EXPERTS, *tiny.WITH_TEXT])
def test_statistics_of_families(family):
    expected = measure_statistics(engine_of(tiny.build(family)), tiny.TEXT)
    model = tiny.build(family)
    assert_same_statistics(measure_statistics(streamed(model, 1), tiny.TEXT), expected)
    assert_same(model, tiny.build(family))


def test_weights_are_loaded_twice_but_for_the_last_segment():
    model = tiny.llama(blocks=BLOCKS)
    engine = streamed(model, 1, micro_batch=len(tiny.TEXT))
    before = engine.bytes_loaded
    measure_statistics(engine, tiny.TEXT)
    block = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    once_for_the_fingerprint = BLOCKS
    assert engine.bytes_loaded - before == (2 * BLOCKS - 1 + once_for_the_fingerprint) * block


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_the_fingerprint(family):
    assert fingerprint(streamed(tiny.build(family), 1)) == fingerprint(engine_of(tiny.build(family)))


@pytest.mark.parametrize(("method", "allocation", "order"), tiny.EVERY_RUN)
def test_masks(method, allocation, order):
    settings = {"method": method, "allocation": allocation, "order": order, "guard": "none", "fisher_samples": "4"}
    dense, model = tiny.llama(blocks=BLOCKS), tiny.llama(blocks=BLOCKS)
    expected = tiny.prune(dense, **settings)
    report = tiny.prune(model, engine="streamed", segment=1, **settings)
    assert (report.engine, report.segment) == ("streamed", 1) and report.bytes_loaded > 0
    assert (expected.engine, expected.segment, expected.bytes_loaded) == ("resident", None, None)
    assert report.domains == expected.domains
    assert_same(model, dense)
    tiny.check_counts(model, report)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (partial(tiny.llama, blocks=BLOCKS), {"method": "fwanda", "allocation": "auto"}),
        (partial(tiny.llama, blocks=BLOCKS), {"method": "fsparsegpt", "allocation": "response"}),
        (tiny.llava, {"method": "wanda", "order": "sequential"}),
    ],
    ids=["fwanda-auto", "fsparsegpt-response", "multimodal"],
)
def test_no_operation_reads_weights_that_are_not_loaded(make, settings):
    model = make().eval()
    with OnlyCopied(model):
        tiny.prune(model, engine="streamed", segment=1, guard="none", **settings)
    with OnlyCopied(model), pytest.raises((AssertionError, UserError), match="aten"):
        tiny.prune(model, method="magnitude")


@pytest.mark.parametrize("settings", tiny.RUNS, ids=tiny.run_name)
@pytest.mark.parametrize("family", ["gpt2", "gemma3", "mixtral", "gpt_oss", "jetmoe"])
def test_masks_of_families(family, settings):
    dense, model = tiny.build(family), tiny.build(family)
    tiny.prune(dense, **settings)
    tiny.prune(model, engine="streamed", segment=1, **settings)
    assert_same(model, dense)


@pytest.mark.parametrize("settings", [{"pattern": "2:4", "sparsity": None}, {"order": "true-sequential"}], ids=str)
@pytest.mark.parametrize("method", ["wanda", "sparsegpt", "fsparsegpt"])
def test_patterns_and_orders(method, settings):
    dense, model = tiny.llama(blocks=BLOCKS), tiny.llama(blocks=BLOCKS)
    tiny.prune(dense, method=method, **settings)
    tiny.prune(model, method=method, engine="streamed", segment=2, **settings)
    assert_same(model, dense)


def test_a_segment_of_all_blocks_is_the_resident_engine():
    model = tiny.llama(blocks=BLOCKS)
    config = fwanda_pruner.PruneConfig(engine="streamed", segment=BLOCKS)
    assert type(make_engine(model, find_targets(model)[0], config)) is ResidentEngine


def move_the_rest_to_meta(model) -> torch.device:
    """The device "meta" stands for a GPU."""
    meta = torch.device("meta")
    for module in set(model.modules()) - set(find_blocks(model)[1].modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.to(meta)))
    return meta


@pytest.mark.parametrize("make", [partial(tiny.llama, blocks=BLOCKS), tiny.llava, partial(tiny.build, "gpt2")])
def test_blocks_that_lie_apart_are_streamed(make):
    model = make()
    targets = find_targets(model)[0]
    assert not blocks_lie_apart(model)
    meta = move_the_rest_to_meta(model)
    assert blocks_lie_apart(model)
    engine = make_engine(model, targets, fwanda_pruner.PruneConfig())
    assert engine.name == "streamed" and engine.device == meta
    with pytest.raises(UserError, match="load it with --engine resident"):
        make_engine(model, targets, fwanda_pruner.PruneConfig(engine="resident"))
    find_blocks(model)[1][0].to(meta)
    assert not blocks_lie_apart(model)


def test_weights_are_at_home_after_an_error():
    model = tiny.llama(blocks=BLOCKS)
    homes = [parameter.data_ptr() for parameter in model.parameters()]
    engine = streamed(model, 1)
    with pytest.raises(ZeroDivisionError), engine.walk(tiny.TEXT) as walk, engine.block(1):
        walk.advance(0)
        raise ZeroDivisionError
    assert [parameter.data_ptr() for parameter in model.parameters()] == homes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "resident", "segment": 2}, "--segment has no effect"),
        ({"engine": "streamed", "segment": 0}, "--segment must be an integer"),
        ({"engine": "streamed", "compile": "on"}, "--compile on has no effect"),
        ({"engine": "streams"}, "--engine must be one of"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(UserError, match=message):
        fwanda_pruner.PruneConfig(**settings)


@pytest.mark.parametrize("command", ["eval", "sweep"])
def test_tasks_of_lm_eval_are_refused(command, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("cells: [{method: wanda}]\ntasks: [boolq]\n")
    rest = ["--tasks", "boolq"] if command == "eval" else [str(recipe), "--output", str(tmp_path / "out")]
    assert main([command, "no-model", *rest, "--engine", "streamed"]) == 2
    assert "the tasks of lm-eval (boolq) need all weights on the device" in capsys.readouterr().err


def test_tasks_of_a_loaded_model_are_refused():
    model = tiny.llama(blocks=BLOCKS)
    move_the_rest_to_meta(model)
    with pytest.raises(UserError, match=r"load_model\(name, engine='resident'\)"):
        evaluate_tasks(model, tiny.tokenizer(), ["boolq"])


def test_perplexity_is_that_of_the_resident_engine(tmp_path, capsys):
    tiny.llama(blocks=BLOCKS).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    figures = []
    for engine in (["resident"], ["streamed", "--segment", "2"]):
        command = ["eval", str(tmp_path), "--device", "cpu", "--eval", "sample", "--eval-seqlen", "64"]
        assert main([*command, "--eval-windows", "4", "--engine", *engine]) == 0
        figures.append(json.loads(capsys.readouterr().out))
    assert figures[0] == figures[1] and figures[0]["perplexity"]


def test_the_model_writes_the_same_text():
    settings = {"calibration": "self", "seqlen": 16, "nsamples": 2, "guard": "none", "progress": False}
    dense, model = tiny.llama(blocks=BLOCKS), tiny.llama(blocks=BLOCKS)
    expected = fwanda_pruner.prune(dense, tiny.tokenizer(), **settings)
    with pytest.warns(UserWarning, match="loads all weights for each token"):
        report = fwanda_pruner.prune(model, tiny.tokenizer(), engine="streamed", segment=1, **settings)
    assert report.tokens_sha256 == expected.tokens_sha256
    assert_same(model, dense)


@pytest.mark.parametrize("segment", [2, 3])
def test_a_block_is_loaded_while_another_computes(segment):
    """Each block but the first is there before it is needed, in both directions."""
    blocks, early = 6, {"forward": [], "backward": []}
    model = tiny.llama(blocks=blocks)
    homes = [block.self_attn.q_proj.weight.data_ptr() for block in model.model.layers]

    def note(index: int, way: str) -> None:
        if model.model.layers[index].self_attn.q_proj.weight.data_ptr() != homes[index]:
            early[way].append(index)

    def note_gradient(index: int, output) -> None:
        output.register_hook(lambda _: note(index, "backward"))

    for index, block in enumerate(model.model.layers):
        block.register_forward_pre_hook(lambda *_, index=index: note(index, "forward"))
        block.register_forward_hook(lambda _block, _args, output, index=index: note_gradient(index, output))
    engine = streamed(model, segment, micro_batch=len(tiny.TEXT))
    engine.measure(tiny.TEXT, Sums(), backward=True)
    assert early["forward"] == list(range(1, blocks))
    after_a_turn = blocks - segment - 1  # the blocks that keep their activations take all room until then
    assert early["backward"] == [i for i in reversed(range(blocks)) if i != after_a_turn]
    assert engine.weights.most_loaded == segment


class CountedCopies:
    """Stands for the RAM beside a GPU."""

    def __init__(self):
        self.lent, self.returned = [], 0

    def away(self, tensor):
        self.lent.append(weakref.ref(tensor.untyped_storage()))
        return tensor.clone()

    def back(self, tensor):
        self.returned += 1
        return tensor


def test_inputs_of_blocks_leave_the_device_until_the_backward_pass():
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)]
    copies, x = CountedCopies(), torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad(blocks[2](blocks[1](blocks[0](x * 2))).sum(), x)[0]
    mask = torch.ones(4, 8)
    hidden = x * 2
    for block in blocks:
        with kept_away(hidden, copies):
            run = lambda hidden, mask, block=block: block(hidden * mask)  # noqa: E731
            hidden = checkpoint(run, hidden, mask, use_reentrant=False)
    assert len(copies.lent) == 3 and not any(storage() for storage in copies.lent)
    assert torch.equal(torch.autograd.grad(hidden.sum(), x)[0], expected) and copies.returned == 3


def test_inputs_stay_where_the_ram_is_full(monkeypatch):
    monkeypatch.setattr(memory, "free_ram", lambda: 0)
    copies, hidden = CountedCopies(), torch.randn(4, 8, requires_grad=True) * 2
    with kept_away(hidden, copies):
        output = checkpoint(torch.nn.Linear(8, 8), hidden, use_reentrant=False)
    output.sum().backward()
    assert not copies.lent


class ShortMemory(TorchDispatchMode):
    """Raises torch's error at the n-th copy of a weight."""

    def __init__(self, copies: int):
        self._copies = copies

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is aten.clone.default:
            self._copies -= 1
            if not self._copies:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return operation(*args, **(kwargs or {}))


@pytest.mark.fault("memory while calibrating")
def test_memory_that_ends_while_a_block_is_loaded():
    expected = measure_statistics(engine_of(tiny.llama(blocks=BLOCKS), micro_batch=1), tiny.TEXT)
    engine = streamed(tiny.llama(blocks=BLOCKS), 2, micro_batch=2)
    with ShortMemory(5), pytest.warns(UserWarning, match="starting again with 1 windows"):
        statistics = measure_statistics(engine, tiny.TEXT)
    assert_same_statistics(statistics, expected)


def mapped_files() -> str:
    return Path("/proc/self/maps").read_text()


def test_a_checkpoint_is_read_in_place_and_pruned(tmp_path):
    """Weights stay in the mapped file of their folder, and the saved model is that of the resident engine."""
    tiny.llama(blocks=BLOCKS).save_pretrained(tmp_path / "dense")
    before = (tmp_path / "dense/model.safetensors").read_bytes()
    files = {}
    for engine in ("resident", "streamed"):
        model = fwanda_pruner.load_model(tmp_path / "dense", device="cpu", engine=engine).model
        if engine == "streamed":
            assert "dense/model.safetensors" in mapped_files()
        report = tiny.prune(model, engine=engine)
        fwanda_pruner.save_pruned(model, None, report, tmp_path / engine)
        files[engine] = (tmp_path / engine / "model.safetensors").read_bytes()
    assert files["streamed"] == files["resident"] != before
    assert (tmp_path / "dense/model.safetensors").read_bytes() == before


def test_a_second_engine_finds_what_the_first_wrote(monkeypatch):
    """Each engine may move the home of a weight."""
    monkeypatch.setattr(memory, "free_ram", lambda: 0)
    model = tiny.llama(blocks=BLOCKS)
    first, second = streamed(model, 1), streamed(model, 1)
    for number, engine in enumerate((first, second, first), 1):
        with engine.block(1, writes=True) as block:
            for weight in block.weights.values():
                weight.fill_(number)
        for other in (first, second):
            with other.block(1) as block:
                assert all(bool((weight == number).all()) for weight in block.weights.values())


def test_pruned_weights_go_to_a_file_where_the_ram_is_full(monkeypatch):
    monkeypatch.setattr(memory, "free_ram", lambda: 0)
    dense, model = tiny.llama(blocks=BLOCKS), tiny.llama(blocks=BLOCKS)
    tiny.prune(dense)
    tiny.prune(model, engine="streamed", segment=1)
    assert_same(model, dense)
    assert "fwanda-" in mapped_files()


def kernel_files(folder: Path, values: dict[str, str]) -> Path:
    for name, text in values.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


MEMINFO = {"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 900 kB\n"}
CGROUP = {"sys/fs/cgroup/memory.current": "500000\n", "sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 40000\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MEMINFO, 900 * 1024),  # not MemFree: what caches files is free, too
        (MEMINFO | CGROUP | {"sys/fs/cgroup/memory.max": "600000\n"}, 140_000),
        (MEMINFO | CGROUP | {"sys/fs/cgroup/memory.max": "400000\n"}, 0),
        (MEMINFO | CGROUP | {"sys/fs/cgroup/memory.max": "max\n"}, 900 * 1024),
    ],
    ids=["machine", "container", "full", "unlimited"],
)
def test_free_ram(files, expected, tmp_path):
    assert memory.free_ram(kernel_files(tmp_path, files)) == expected


def test_free_ram_of_this_machine():
    assert 0 < memory.free_ram() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory):
    """A model of 67 MB, 16.8 MB a block."""
    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
    tiny.llama(blocks=BLOCKS, **sizes).save_pretrained(folder)
    return folder


def bytes_in_ram(kind: str, file: str | None = None) -> int:
    """Of this process; with `file`, of the mappings of files of that name."""
    if file is None:
        return field_of(Path("/proc/self/status").read_text(), kind)
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    return sum(field_of(part, kind) for part in parts if file in part.partition("\n")[0])


def field_of(text: str, kind: str) -> int:
    return int(re.search(rf"^{kind}:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024


def test_a_checkpoint_is_read_block_by_block(large_folder):
    """Loading reads no weights, and the blocks that ran leave nothing behind but pages of the file."""
    file = str(large_folder / "model.safetensors")
    size, before = os.path.getsize(file), bytes_in_ram("RssAnon")
    model = fwanda_pruner.load_model(large_folder, device="cpu", engine="streamed").model
    assert bytes_in_ram("Rss", file) < 0.1 * size
    engine = streamed(model, 1)
    measure_statistics(engine, tiny.TEXT)
    assert bytes_in_ram("Rss", file) > 0.9 * size
    assert bytes_in_ram("Anonymous", file) == 0
    assert bytes_in_ram("RssAnon") - before < 0.6 * size


def test_saving_copies_no_weights(large_folder, tmp_path):
    model = fwanda_pruner.load_model(large_folder, device="cpu", engine="streamed").model
    report = tiny.prune(model, method="magnitude", engine="streamed", segment=1)
    before, peak, done = bytes_in_ram("RssAnon"), [], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak.append(bytes_in_ram("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    fwanda_pruner.save_pruned(model, None, report, tmp_path / "pruned")
    done.set()
    watcher.join()
    assert max(peak) - before < 0.5 * os.path.getsize(large_folder / "model.safetensors")


def test_a_block_that_overwrites_its_input_is_refused():
    model = tiny.llama(blocks=BLOCKS)
    block = model.model.layers[1]
    forward = block.forward
    block.forward = lambda hidden, *args, **kwargs: forward(hidden.mul_(2), *args, **kwargs)
    with pytest.raises(UserError, match="decoder block 1 overwrites its input"):
        streamed(model, 1).measure(tiny.TEXT, Sums(), backward=True)
