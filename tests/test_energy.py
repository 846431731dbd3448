"""The energy meter, on an NVML of the test's own."""

import sys
from types import SimpleNamespace

import pytest
import torch

from fwanda_pruner.energy import EnergyMeter


class FakeNvml:
    """Two GPUs by UUID, each with a counter in mJ."""

    def __init__(self):
        self.counters = {"GPU-aa": 5_000_000, "GPU-bb": 70_000, "GPU-hidden": 0}
        self.open = 0
        self.failure = None

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if self.failure:
            raise self.failure
        return self.counters[handle]


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=["aa", "bb"][i]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return fake


def test_joules_are_summed_over_the_visible_gpus(nvml):
    with EnergyMeter("cuda") as meter:
        nvml.counters["GPU-aa"] += 1500
        nvml.counters["GPU-bb"] += 250
        nvml.counters["GPU-hidden"] += 999_000
    assert meter.result == 1.75
    assert nvml.open == 0


def test_work_still_queued_on_the_gpu_is_waited_for_before_each_reading(nvml, monkeypatch):
    waits = []

    def synchronize(device=None):
        waits.append(device)
        nvml.counters["GPU-aa"] += 1000

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with EnergyMeter("cuda:1") as meter:
        assert waits == [torch.device("cuda:1")]
    assert len(waits) == 2 and meter.result == 1.0


def test_nothing_is_measured_on_a_cpu(nvml):
    with EnergyMeter(torch.device("cpu")) as meter:
        nvml.counters["GPU-aa"] += 1500
    assert meter.result == "not measured: the device is cpu"
    assert nvml.open == 0


def test_a_missing_nvml_package_is_the_result(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with EnergyMeter("cuda") as meter:
        pass
    assert meter.result.startswith("not measured: no NVML")


def test_an_nvml_error_at_the_start_or_at_the_end_is_the_result(nvml):
    nvml.failure = RuntimeError("Not\nSupported")
    with EnergyMeter("cuda") as meter:
        nvml.failure = None
    assert meter.result == "not measured: Not Supported"
    assert nvml.open == 0
    with EnergyMeter("cuda") as meter:
        nvml.failure = RuntimeError("GPU is lost")
    assert meter.result == "not measured: GPU is lost"
    assert nvml.open == 0


def test_an_error_of_the_work_passes_through_and_nvml_is_closed(nvml):
    with pytest.raises(KeyError), EnergyMeter("cuda") as meter:
        nvml.failure = RuntimeError("GPU is lost")
        raise KeyError("work")
    assert meter.result == "not measured: GPU is lost" and nvml.open == 0


def test_the_result_inside_the_block_is_not_a_number(nvml):
    with EnergyMeter("cuda") as meter:
        assert meter.result.startswith("not measured")
