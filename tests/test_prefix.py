"""Several masks share one pass through the blocks before the first target, and no loss changes by a bit."""

import gc
import weakref

import pytest
import tiny
import torch
from measuring import batch_above, input_sizes, out_of_memory

from fwanda_pruner import PruneConfig
from fwanda_pruner.allocate.judge import Judge
from fwanda_pruner.allocate.masks import masks_of, pack
from fwanda_pruner.engine.loop import PassSettings
from fwanda_pruner.engine.resident import ResidentEngine
from fwanda_pruner.measure.statistics import measure_statistics
from fwanda_pruner.model.targets import find_blocks, find_targets
from fwanda_pruner.text.domains import Domain

TOKENS, SETTINGS = tiny.tokens(7, 24), PassSettings(3, compile="off")
CONFIG = PruneConfig(method="fwanda", allocation="global", sparsity="0.6").resolved()


def engine_from(model, first: int) -> ResidentEngine:
    """An engine whose first target is in block `first`."""
    return ResidentEngine(model, [t for t in find_targets(model)[0] if t.block >= first], progress=False)


def masks_for(engine):
    return pack(engine, masks_of(CONFIG, engine, measure_statistics(engine, TOKENS)))


def as_tuples(model) -> None:
    """The blocks return tuples, as in transformers 4, and the model takes the hidden states out of them again."""
    for block in find_blocks(model)[1]:
        block.register_forward_hook(lambda _module, _args, output: output if isinstance(output, tuple) else (output,))
        block.register_forward_pre_hook(lambda _module, args: (args[0][0] if isinstance(args[0], tuple) else args[0],))
    norm = model.model.norm
    norm.register_forward_pre_hook(lambda _module, args: args[0] if isinstance(args[0], tuple) else args)


def llama_of_tuples():
    model = tiny.llama()
    as_tuples(model)
    return model


MODELS = {name: lambda name=name: tiny.build(name) for name in ("mistral", "gpt2", "bloom", "gemma2", "mixtral")}
MODELS["tuples"] = llama_of_tuples


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_the_same_to_the_bit_and_the_prefix_runs_once(name):
    model = MODELS[name]()
    engine, blocks = engine_from(model, 1), find_blocks(model)[1]
    masks = masks_for(engine)
    expected = [engine.window_losses(TOKENS, m, settings=SETTINGS) for m in (None, masks, None)]
    inner = next(module for module in blocks[0].modules() if "norm" in type(module).__name__.lower())
    prefix = engine.shared_prefix()
    with input_sizes(inner) as first, input_sizes(find_targets(model)[0][-1].module) as last:
        found = [engine.window_losses(TOKENS, m, settings=SETTINGS, prefix=prefix) for m in (None, masks, None)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert first == [3, 3, 1] and (len(last) == 9 or name == "mixtral")
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("targets_from", [0, 2, 3])
def test_the_prefix_ends_before_the_first_target(targets_from):
    model = tiny.llama(blocks=4)
    engine, runs = engine_from(model, targets_from), []
    for index, block in enumerate(model.model.layers):
        block.mlp.register_forward_hook(lambda *_, index=index: runs.append(index))
    prefix = engine.shared_prefix()
    for _ in range(2):
        engine.window_losses(TOKENS, prefix=prefix)
    assert runs == [0, 1, 2, 3, *range(targets_from, 4)]


@pytest.mark.filterwarnings("ignore:.*ran out of memory")
@pytest.mark.parametrize("where", ["early", "late"])
def test_windows_stay_apart_where_memory_runs_out(where):
    """Also where passes of the larger size have kept outputs, and where a later call starts with that size again."""
    model = tiny.llama()
    engine = engine_from(model, 1)
    masks = masks_for(engine)
    expected = {size: engine.window_losses(TOKENS, masks, settings=PassSettings(size)) for size in (1, 2, 4)}
    prefix = engine.shared_prefix()
    calls = iter([False] if where == "late" else [])
    with out_of_memory(model.model.norm, lambda x: batch_above(2)(x) and next(calls, True)):
        for size in (4, 4, 2, 1, 4):
            found = engine.window_losses(TOKENS, masks, settings=PassSettings(size), prefix=prefix)
            assert torch.equal(found, expected[min(size, 2)])
    found = engine.window_losses(TOKENS, masks, settings=PassSettings(4), prefix=prefix)
    assert torch.equal(found, expected[4])


def test_a_block_that_writes_to_its_input_changes_nothing_that_is_kept():
    model = tiny.llama()
    engine = engine_from(model, 1)
    model.model.layers[1].register_forward_pre_hook(lambda _module, args: (args[0].mul_(1.5),))
    expected, prefix = engine.window_losses(TOKENS), engine.shared_prefix()
    for _ in range(3):
        assert torch.equal(engine.window_losses(TOKENS, prefix=prefix), expected)


def test_blocks_that_hand_on_more_than_hidden_states_run_each_time():
    """The blocks of some models share keys and values through a dictionary."""
    model, shared = tiny.llama(), {}
    first, last = model.model.layers
    for block in (first, last):
        block.register_forward_pre_hook(lambda _m, args, kwargs: (args, {**kwargs, "shared": shared}), with_kwargs=True)
    first.mlp.register_forward_hook(lambda _module, _args, output: shared.update(state=output))
    last.mlp.register_forward_hook(lambda _module, _args, output: output + shared.pop("state"))
    engine = engine_from(model, 1)
    expected, prefix = engine.window_losses(TOKENS), engine.shared_prefix()
    for _ in range(2):
        assert torch.equal(engine.window_losses(TOKENS, prefix=prefix), expected)


def test_the_prefix_is_restored_after_an_error():
    model = tiny.llama()
    engine = engine_from(model, 1)
    prefix = engine.shared_prefix()
    for _ in range(2):  # while outputs are kept, and while they replace the block
        handle = model.model.norm.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.window_losses(TOKENS, prefix=prefix)
        handle.remove()
        assert "forward" not in vars(model.model.layers[0]) and not model.model.layers[0]._forward_hooks


def test_a_judge_runs_the_prefix_once_and_frees_it():
    class Noting(ResidentEngine):
        def shared_prefix(self):
            prefix = super().shared_prefix()
            self.prefix = weakref.ref(prefix)
            return prefix

    model = tiny.llama()
    engine = Noting(model, engine_from(model, 1).targets, progress=False)
    masks = masks_for(engine)
    domains = [Domain(name, True, False, True, TOKENS[:0], TOKENS[:3]) for name in ("one", "two")]
    with input_sizes(model.model.layers[0].mlp) as sizes:
        judge = Judge(engine, domains, masks)
        assert judge.losses(masks) == judge.wanda != judge.dense
    assert sizes == [6] and engine.prefix() is not None
    del judge
    gc.collect()
    assert engine.prefix() is None
