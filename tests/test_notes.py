"""Warnings: where they point, what the filters of the caller do, and which run they belong to."""

import threading
import warnings

import pytest
import tiny

import fwanda_pruner
from fwanda_pruner.notes import recording, warn

FEW = "6 calibration samples are few: use at least 16"


def prune(model=None, **settings):
    """A run that warns of its few windows."""
    model = model or tiny.llama()
    return fwanda_pruner.prune(model, calibration=tiny.TEXT, progress=False, method="wanda", **settings)


@pytest.mark.fault("warnings")
@pytest.mark.parametrize("call", ["prune", "collect", "wanda block by block"])
def test_a_warning_points_at_the_line_that_calls_the_package(call):
    model, text = tiny.llama(), {"calibration": tiny.TEXT, "progress": False}
    with pytest.warns(UserWarning, match="few") as caught:
        if call == "prune":
            fwanda_pruner.prune(model, method="fwanda", **text)
        elif call == "collect":
            fwanda_pruner.collect(model, **text)
        else:
            fwanda_pruner.prune(model, method="wanda", order="sequential", **text)
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.fault("warnings")
def test_the_filters_of_the_caller_hold_and_the_record_has_every_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", ".* samples are few")
        report = prune()
    assert FEW in report.warnings and caught == []
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="samples are few"):
        warnings.simplefilter("error")
        prune()


def test_the_filters_and_the_output_of_warnings_are_those_of_the_caller_afterwards():
    before = warnings.showwarning, list(warnings.filters)
    with warnings.catch_warnings(record=True):
        inside = warnings.showwarning
        prune()
        assert warnings.showwarning is inside
    assert (warnings.showwarning, list(warnings.filters)) == before


def test_a_run_warns_once_of_the_same_thing():
    notes = []
    with pytest.warns(UserWarning) as caught, recording(notes):
        warn("ours")
        warn("ours")
        warnings.warn("of a library", UserWarning, stacklevel=1)
    assert notes == ["ours"] and [str(warning.message) for warning in caught] == ["ours", "of a library"]


def test_outside_of_a_run_nothing_is_recorded():
    notes = []
    with recording(notes):
        pass
    with pytest.warns(UserWarning, match="later"):
        warn("later")
    assert notes == []


@pytest.mark.fault("threads")
def test_two_runs_at_once_have_their_own_warnings():
    """Each thread is inside its run while the other one warns."""
    both = threading.Barrier(2, timeout=60)
    found = {}

    def run(name: str) -> None:
        notes = found[name] = []
        with recording(notes):
            both.wait()
            warn(f"of {name}")
            both.wait()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {"one": ["of one"], "two": ["of two"]}


@pytest.mark.fault("threads")
def test_two_prunings_at_once_give_what_each_gives_alone():
    patterns = ("2:4", None)
    alone = [prune(pattern=pattern) for pattern in patterns]
    models, together = [tiny.llama() for _ in patterns], [None, None]

    def run(index: int) -> None:
        together[index] = prune(models[index], pattern=patterns[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(alone, together, strict=True):
        assert one.warnings == other.warnings and one.matrices == other.matrices
        assert one.domains == other.domains
