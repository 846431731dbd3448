"""The stages of a run: what is computed again after an interruption, what it costs, and what it warns of."""

import time
import warnings

import pytest
import torch

from fwanda_pruner.notes import recording, warn
from fwanda_pruner.run.stage import Codec, Stages
from fwanda_pruner.run.state import RunState
from fwanda_pruner.stage_names import StageName

CPU = torch.device("cpu")
SCALED = Codec(lambda x: ({"x": x}, {"by": 2}), lambda tensors, values: tensors["x"] * values["by"])


class Compute:
    """Counts how often a stage is computed."""

    calls = 0

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        return torch.ones(3)


def files(state: RunState) -> set[str]:
    return {path.name for path in state.folder.glob("*.safetensors")}


@pytest.fixture
def state(tmp_path) -> RunState:
    return RunState(tmp_path / "out")


def test_a_stage_with_a_codec_is_computed_once_and_then_recalled(state):
    compute = Compute()
    assert Stages(state, CPU)(StageName.TEXT, compute, SCALED).tolist() == [1, 1, 1]
    later = Stages(state, CPU)
    assert later(StageName.TEXT, compute, SCALED).tolist() == [2, 2, 2]  # what the codec makes of the file
    assert compute.calls == 1 and files(state) == {"text.safetensors"} and later.seconds == {}


def test_a_stage_without_a_codec_is_computed_in_every_run(state):
    compute = Compute()
    for _ in range(2):
        stage = Stages(state, CPU)
        assert stage(StageName.PRUNE, compute).tolist() == [1, 1, 1] and stage.seconds.keys() == {"prune"}
    assert compute.calls == 2 and files(state) == set()


def test_without_a_folder_nothing_is_recalled():
    compute, state = Compute(), RunState()
    for _ in range(2):
        Stages(state, CPU)(StageName.TEXT, compute, SCALED)
    assert compute.calls == 2


def test_a_stage_that_fails_is_not_kept_but_counts(state):
    def fail():
        raise KeyError("broken")

    stage = Stages(state, CPU)
    with pytest.raises(KeyError):
        stage(StageName.TEXT, fail, SCALED)
    assert files(state) == set() and stage.seconds.keys() == {"text"}


def test_seconds_of_one_stage_add_up(monkeypatch, state):
    times = iter([10.0, 11.5, 100.0, 102.0, 200.0, 200.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    stage = Stages(state, CPU)
    stage(StageName.CHECK, Compute(), SCALED)
    stage(StageName.PRUNE, Compute())
    stage(StageName.CHECK, Compute())
    assert stage.seconds == {"check": 1.75, "prune": 2.0}


def test_the_parts_of_a_stage_are_there_until_the_stage_is_kept(state):
    """A partial state and steps belong to the stage; those of other stages stay."""
    earlier = Stages(state, CPU)
    earlier.unfinished(StageName.CALIBRATE).save({"x": torch.ones(1)}, {"done": 5})
    earlier.steps(StageName.CALIBRATE, SCALED).save(3, torch.ones(2))
    earlier.steps(StageName.CHOOSE, SCALED).save(0, torch.ones(2))

    stage = Stages(state, CPU)
    partial, steps = stage.unfinished(StageName.CALIBRATE), stage.steps(StageName.CALIBRATE, SCALED)
    seen = {}

    def compute():
        seen.update(unfinished=partial.load(), third=steps.load(3), first=steps.load(0))
        return torch.ones(3)

    stage(StageName.CALIBRATE, compute, SCALED)
    tensors, values = seen["unfinished"]
    assert tensors["x"].tolist() == [1] and values == {"done": 5}
    assert seen["third"].tolist() == [2, 2] and seen["first"] is None
    assert partial.load() is None and steps.load(3) is None
    assert files(state) == {"calibrate.safetensors", "choose-00000.safetensors"}


def test_a_partial_state_is_due_about_once_a_minute(monkeypatch, state):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    partial = Stages(state, CPU).unfinished(StageName.CALIBRATE)
    assert not partial.due()
    now[0] += 61
    assert partial.due()
    partial.save({}, {})
    assert not partial.due()


def interrupted(output) -> None:
    """A run that warns in two stages and ends behind them."""
    state = RunState(output)
    stage = Stages(state, CPU)
    with recording(stage.notes):
        stage(StageName.TEXT, lambda: warn("few windows") or torch.ones(1), SCALED)
        stage(StageName.CALIBRATE, lambda: warn("an idle expert") or torch.ones(1), SCALED)
        warn("after the last stage")


def test_the_notes_of_an_interrupted_run_come_back_once(tmp_path, recwarn):
    interrupted(tmp_path / "out")
    stage = Stages(RunState(tmp_path / "out", resume=True), CPU)
    assert stage.notes == []
    with recording(stage.notes):
        stage(StageName.TEXT, Compute(), SCALED)
        assert stage.notes == ["few windows"]
        stage(StageName.CALIBRATE, Compute(), SCALED)
        warn("an idle expert")
        warn("new")
    assert stage.notes == ["few windows", "an idle expert", "new"]


def test_the_meter_gets_the_stages_inside_its_block():
    class Meter:
        def __init__(self):
            self.phases = []

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def phase(self, name):
            self.phases.append(name)
            return warnings.catch_warnings()

    stage, meter = Stages(RunState(), CPU), Meter()
    stage(StageName.TEXT, Compute())
    with stage.metered(meter) as entered:
        stage(StageName.CALIBRATE, Compute())
        stage(StageName.PRUNE, Compute())
    stage(StageName.EVAL_PRUNED, Compute())
    assert entered is meter and meter.phases == ["calibrate", "prune"]
