"""The streamed engine waits for its copies: on side streams that are as late as they may be, the bits are the same."""

import pytest
import tiny
import torch
from late_streams import COMPUTING, late_streams
from measuring import engine_of

from fwanda_pruner import UserError
from fwanda_pruner.engine.loop import PassSettings
from fwanda_pruner.engine.streamed import StreamedEngine
from fwanda_pruner.measure.statistics import measure_statistics
from fwanda_pruner.model.targets import find_targets

BLOCKS = 5


def measured(segment: int):
    model = tiny.llama(blocks=BLOCKS)
    engine = StreamedEngine(model, find_targets(model)[0], PassSettings(2), segment=segment, progress=False)
    return measure_statistics(engine, tiny.TEXT)


@pytest.mark.parametrize("segment", [1, 2, 4])
def test_statistics(segment, monkeypatch):
    expected = measure_statistics(engine_of(tiny.llama(blocks=BLOCKS), micro_batch=2), tiny.TEXT)
    late_streams(monkeypatch)
    statistics = measured(segment)
    for kind in ("x2", "g2"):
        for name, tensor in getattr(expected, kind).items():
            assert torch.equal(getattr(statistics, kind)[name], tensor), f"{name}.{kind}"


@pytest.mark.parametrize(
    "settings",
    [{"method": "wanda", "order": "sequential"}, {"method": "fsparsegpt"}, {"method": "fwanda", "allocation": "auto"}],
    ids=lambda settings: settings["method"],
)
def test_masks(settings, monkeypatch):
    dense, model = tiny.llama(blocks=BLOCKS), tiny.llama(blocks=BLOCKS)
    tiny.prune(dense, guard="none", **settings)
    late_streams(monkeypatch)
    report = tiny.prune(model, engine="streamed", segment=2, guard="none", **settings)
    assert report.engine == "streamed"
    for (name, parameter), expected in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(parameter, expected), name


def test_a_computation_that_does_not_wait_is_found(monkeypatch):
    late_streams(monkeypatch)
    monkeypatch.setattr(COMPUTING, "wait_event", lambda event: None)
    with pytest.raises(UserError, match="NaN or inf"):
        measured(2)
