"""The energy meter, on an NVML and a clock of the test's own."""

import sys
import threading
import time
from types import SimpleNamespace

import pytest
import tiny
import torch

import fwanda_pruner
from fwanda_pruner.run import pipeline
from fwanda_pruner.run.energy import Energy, EnergyMeter, Timer, idle_power, trapezoid

IDLE = 100.0


class Clock:
    """Time that passes only in sleep(), which also makes the calls that fall due."""

    def __init__(self):
        self.time, self.calls = 1000.0, {}

    def now(self):
        return self.time

    def sleep(self, seconds):
        end = self.time + seconds
        while self.calls:
            due, call, period = min(self.calls.values(), key=lambda item: item[0])
            if due > end:
                break
            self.time, self.calls[call] = due, (due + period, call, period)
            call()
        self.time = end

    def every(self, seconds, call):
        self.calls[call] = (self.time + seconds, call, seconds)
        return lambda: self.calls.pop(call)


class FakeNvml:
    """GPUs by UUID, at IDLE watts but for stretches of work whose power runs linearly.

    `lag` and `tick` delay the counter: it shows what was used up to `lag` seconds ago, in steps of `tick` seconds.
    """

    def __init__(self, clock):
        self.clock, self.open, self.lag, self.tick, self.limit = clock, 0, 0.0, 0.0, 700_000
        self.work = {"GPU-aa": [], "GPU-bb": [], "GPU-hidden": []}
        self.failures = {}

    def run(self, seconds, first, last=None, gpu="GPU-aa"):
        """Work whose power goes from first to last watts; the clock runs on."""
        self.work[gpu].append((self.clock.time, seconds, first, first if last is None else last))
        self.clock.sleep(seconds)

    def watts(self, gpu, time):
        for start, seconds, first, last in self.work[gpu]:
            if start <= time < start + seconds:
                return first + (last - first) * (time - start) / seconds
        return IDLE

    def joules(self, gpu, time):
        total = IDLE * time
        for start, seconds, first, last in self.work[gpu]:
            run = min(max(time - start, 0.0), seconds)
            total += run * (first + (last - first) * run / seconds / 2 - IDLE)
        return total

    def _serve(self, name):
        if name in self.failures:
            raise self.failures[name]

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu):
        self._serve("counter")
        time = self.clock.time - self.lag
        return round(1000 * self.joules(gpu, time // self.tick * self.tick if self.tick else time))

    def nvmlDeviceGetPowerUsage(self, gpu):
        self._serve("power")
        return round(1000 * self.watts(gpu, self.clock.time))

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu):
        self._serve("limit")
        return self.limit


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def nvml(monkeypatch, clock):
    fake = FakeNvml(clock)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=["aa", "bb"][i]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return fake


def energy(seconds=10.0, counter=5000.0, sampled=5000.0, idle=100.0, limit=700.0):
    return Energy(seconds, counter, sampled, idle, limit, {"aa": counter})


def test_the_trapezoid_is_exact_on_constant_and_ramp_traces():
    times = [0.0, 0.1, 0.25, 0.7, 2.0]
    assert trapezoid(times, [300.0] * 5) == 600.0
    assert trapezoid(times, [50 + 400 * t for t in times]) == pytest.approx(50 * 2 + 400 * 2, rel=1e-15)
    assert trapezoid([], []) == trapezoid([1.0], [300.0]) == 0
    with pytest.raises(ValueError, match="2 times and 1 powers"):
        trapezoid([0.0, 1.0], [1.0])


@pytest.mark.parametrize(("first", "last"), [(400, 400), (200, 600)], ids=["constant", "ramp"])
def test_net_counter_and_samples_give_the_joules_of_the_work_alone(nvml, clock, first, last):
    with EnergyMeter("cuda", "net", timer=clock) as meter:
        nvml.run(10, first, last)
    found = meter.energy
    assert found.seconds == pytest.approx(10)
    assert meter.result == found.gross_joules == found.counter_joules == pytest.approx(4000, abs=0.01)
    assert found.sampled_joules == pytest.approx(4000, rel=0.01)
    assert found.idle_watts == pytest.approx(IDLE) and found.net_joules == pytest.approx(3000, abs=0.1)
    assert found.mean_watts == pytest.approx(400) and found.limit_watts == 700
    assert abs(found.difference_percent) < 1 and found.flag is None
    assert nvml.open == 0 and not clock.calls


def test_gross_takes_no_time_and_reads_no_power(nvml, clock):
    nvml.failures["power"] = RuntimeError("power was read")
    start = clock.time
    with EnergyMeter("cuda", timer=clock) as meter:
        assert not clock.calls and clock.time == start
        with meter.phase("calibrate"):
            nvml.run(7, 400)
        clock.sleep(1)
    assert clock.time == start + 8 and not clock.calls and nvml.open == 0
    assert meter.result == meter.energy.counter_joules == pytest.approx(2900, abs=0.01)
    assert meter.phases["calibrate"].gross_joules == pytest.approx(2800, abs=0.01)
    assert meter.energy.idle_watts is meter.energy.net_joules is meter.energy.sampled_joules is None
    assert meter.energy.flag is None


def test_gross_without_a_counter_says_what_to_do(nvml, clock):
    nvml.failures["counter"] = RuntimeError("Not Supported")
    with EnergyMeter("cuda", timer=clock) as meter, meter.phase("work"):
        nvml.run(3, 300)
    expected = "not measured: no energy counter (Not Supported); --energy net samples the power instead"
    assert meter.result == meter.phases["work"] == expected and nvml.open == 0


def test_a_protocol_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="protocol must be one of gross, net, got 'both'"):
        EnergyMeter("cuda", "both")


@pytest.mark.parametrize(("lag", "tick"), [(0.0, 0.1), (0.3, 0.0), (0.6, 0.25)])
def test_a_counter_that_lags_loses_nothing(nvml, clock, lag, tick):
    nvml.lag, nvml.tick = lag, tick
    clock.sleep(5)
    with EnergyMeter("cuda", "net", timer=clock) as meter:
        nvml.run(8.03, 500)
    # a step of the counter at either end, at idle power
    assert meter.energy.counter_joules == pytest.approx(8.03 * 500, abs=IDLE * tick + 1)
    assert meter.energy.flag is None


def test_a_gpu_without_the_counter_is_measured_by_power_alone(nvml, clock):
    nvml.failures["counter"] = RuntimeError("Not Supported")
    with EnergyMeter("cuda", "net", timer=clock) as meter, meter.phase("work"):
        nvml.run(10, 300)
    assert meter.energy.counter_joules is None and meter.energy.difference_percent is None
    assert meter.result == meter.energy.sampled_joules == pytest.approx(3000, rel=0.01)
    assert meter.energy.net_joules == meter.energy.sampled_net_joules == pytest.approx(2000, rel=0.01)
    assert meter.phases["work"].gross_joules == pytest.approx(3000, rel=0.01)


def test_a_gpu_without_power_draw_is_measured_by_its_counter(nvml, clock):
    nvml.failures |= {"power": RuntimeError("Not Supported"), "limit": RuntimeError("Not Supported")}
    with EnergyMeter("cuda", "net", timer=clock) as meter:
        assert not clock.calls  # nothing to sample
        nvml.run(10, 300)
    assert meter.energy.sampled_joules is None and meter.energy.limit_watts is None
    assert meter.result == pytest.approx(3000, abs=0.01) and meter.energy.net_joules == pytest.approx(2000, abs=0.1)


def test_joules_are_summed_over_the_visible_gpus_and_kept_for_each(nvml, clock, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    nvml.work["GPU-bb"].append((clock.time, 4.0, 250.0, 250.0))
    nvml.work["GPU-hidden"].append((clock.time, 4.0, 999.0, 999.0))
    with EnergyMeter("cuda", timer=clock) as meter:
        nvml.run(4, 500)
    assert meter.energy.gpus == pytest.approx({"aa": 2000, "bb": 1000}, abs=0.1)
    assert meter.result == pytest.approx(3000, abs=0.1) and meter.energy.limit_watts == 1400
    assert idle_power("cuda", timer=clock) == pytest.approx(2 * IDLE)


def test_phases_have_their_own_joules_and_add_up(nvml, clock):
    with EnergyMeter("cuda", "net", timer=clock) as meter:
        for _ in range(2):
            with meter.phase("calibrate"):
                nvml.run(3, 600)
        with meter.phase("masks"):
            nvml.run(0.4, 300)
    assert meter.phases["calibrate"].seconds == pytest.approx(6)
    assert meter.phases["calibrate"].gross_joules == pytest.approx(3600, abs=0.1)
    assert meter.phases["calibrate"].sampled_joules is None
    assert meter.phases["masks"] == "not resolved: 0.40 s of work, under 2 s"
    assert meter.result == pytest.approx(3720, abs=0.1)
    facts = meter.to_dict()
    assert facts["phases"]["masks"].startswith("not resolved") and facts["total"]["net_joules"] == pytest.approx(
        3080, abs=0.1
    )


def test_a_window_under_two_seconds_is_not_resolved_and_costs_no_wait(nvml, clock):
    start = clock.time
    with EnergyMeter("cuda", "net", timer=clock) as meter:
        waited = clock.time - start
        nvml.run(1.9, 300)
    assert meter.result == meter.energy == "not resolved: 1.90 s of work, under 2 s"
    assert waited == pytest.approx(2) and clock.time == pytest.approx(start + waited + 1.9)


def test_a_mean_power_that_cannot_be_is_flagged():
    assert energy().flag is None
    assert energy(counter=890, sampled=890).flag == "a mean power of 89 W is below 0.9 of the idle power, 100 W"
    assert energy(counter=901, sampled=901).flag is None
    assert energy(counter=7400, sampled=7400).flag == "a mean power of 740 W is above 1.05 of the power limit, 700 W"
    assert energy(counter=7340, sampled=7340).flag is None
    assert energy(counter=0, sampled=0, idle=None).flag is None
    # the paper: 4.3 kJ in 12 minutes
    assert energy(seconds=720, counter=None, sampled=4300).flag.startswith("a mean power of 6 W is below")


def test_methods_that_disagree_are_flagged_by_how_much_over_five_seconds():
    assert energy(sampled=5300).flag == "power.draw at 10 Hz gives +6.0 % of the counter's energy"
    assert energy(sampled=4760).flag is None and energy(sampled=4760).difference_percent == pytest.approx(-4.8)
    assert energy(seconds=4.9, counter=2500, sampled=2700).flag is None


def test_work_still_queued_on_the_gpu_is_waited_for_at_both_ends(nvml, clock, monkeypatch):
    waits = []

    def synchronize(device=None):
        waits.append(device)
        if len(waits) < 3:  # before the block, and after it
            nvml.run(1.5, 400)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with EnergyMeter("cuda:1", timer=clock) as meter:
        assert waits == [torch.device("cuda:1")]
        nvml.run(1.5, 400)
    assert meter.energy.seconds == pytest.approx(3) and meter.result == pytest.approx(1200, rel=0.01)


def test_idle_power_leaves_out_what_ran_before(nvml, clock):
    nvml.work["GPU-aa"].append((clock.time, 0.9, 600.0, 600.0))
    assert idle_power("cuda", seconds=2, timer=clock) == pytest.approx(IDLE)
    assert nvml.open == 0


def test_nothing_is_measured_on_a_cpu(nvml):
    with EnergyMeter(torch.device("cpu")) as meter, meter.phase("work"):
        pass
    assert meter.result == meter.phases["work"] == "not measured: the device is cpu"
    assert meter.to_dict()["total"] == meter.result and idle_power("cpu") is None
    assert nvml.open == 0


def test_a_missing_nvml_package_is_the_result(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with EnergyMeter("cuda") as meter, meter.phase("work"):
        pass
    assert meter.result == meter.phases["work"] == "not measured: no NVML (pip install nvidia-ml-py)"
    assert idle_power("cuda") is None


def test_a_gpu_with_neither_counter_nor_power_is_the_result(nvml, clock):
    nvml.failures |= {"counter": RuntimeError("no counter"), "power": RuntimeError("Not\nSupported")}
    with EnergyMeter("cuda", "net", timer=clock) as meter:
        nvml.run(3, 300)
    assert meter.result == "not measured: Not Supported" and nvml.open == 0
    assert idle_power("cuda", timer=clock) is None and nvml.open == 0


@pytest.mark.parametrize("protocol", ["gross", "net"])
def test_the_counter_is_read_at_the_ends_alone(nvml, clock, protocol):
    with EnergyMeter("cuda", protocol, timer=clock) as meter, meter.phase("calibrate"):
        nvml.failures["counter"] = RuntimeError("read in between")
        nvml.run(10, 300)
        del nvml.failures["counter"]
    assert meter.result == meter.phases["calibrate"].gross_joules == pytest.approx(3000, abs=0.1)


@pytest.mark.parametrize("what", ["counter", "power"])
def test_an_nvml_error_in_the_middle_is_the_result_of_everything(nvml, clock, what):
    with EnergyMeter("cuda", "net", timer=clock) as meter:
        with meter.phase("calibrate"):
            nvml.run(3, 300)
        nvml.failures[what] = RuntimeError("GPU is lost")
        with meter.phase("budgets"):
            clock.sleep(0.2)
        del nvml.failures[what]  # an end that was missed cannot be made up for
        clock.sleep(3)
    assert meter.result == meter.phases["calibrate"] == "not measured: GPU is lost"
    assert nvml.open == 0 and not clock.calls


def test_an_nvml_error_at_the_end_is_the_result(nvml, clock):
    with EnergyMeter("cuda", timer=clock) as meter:
        nvml.run(0.05, 300)
        nvml.failures["counter"] = RuntimeError("GPU is lost")
    assert meter.result == "not measured: GPU is lost" and nvml.open == 0


def test_an_error_of_the_work_passes_through_and_nvml_is_closed(nvml, clock):
    with pytest.raises(KeyError), EnergyMeter("cuda", "net", timer=clock) as meter, meter.phase("work"):
        start = clock.time
        nvml.run(3, 300)
        raise KeyError("work")
    assert meter.phases["work"].gross_joules == pytest.approx(900, abs=0.1)
    assert nvml.open == 0 and not clock.calls and clock.time == pytest.approx(start + 3)


def test_the_result_inside_the_block_is_not_a_number(nvml, clock):
    with EnergyMeter("cuda", timer=clock) as meter:
        assert meter.result.startswith("not measured")


def test_real_time_samples_in_a_thread_until_it_is_stopped():
    timer, seen, called = Timer(), [], threading.Semaphore(0)

    def call():
        seen.append(timer.now())
        called.release()

    stop = timer.every(0.001, call)
    assert called.acquire(timeout=60) and called.acquire(timeout=60)
    stop()
    count = len(seen)
    timer.sleep(0.05)
    assert count == len(seen) and seen == sorted(seen)


@pytest.mark.parametrize("protocol", ["gross", "net"])
def test_a_run_waits_for_its_energy_only_where_the_idle_power_is_asked_for(nvml, clock, monkeypatch, protocol):
    """A whole run with the meter of a GPU. No work takes time on this clock: only the meter's own waiting does."""
    meters, start = [], clock.time

    def meter(_device, protocol):
        meters.append(EnergyMeter("cuda", protocol, timer=clock))
        return meters[-1]

    def refuse(_seconds):
        raise AssertionError("the run slept")

    monkeypatch.setattr(pipeline, "EnergyMeter", meter)
    monkeypatch.setattr(time, "sleep", refuse)
    monkeypatch.setattr(Timer, "sleep", refuse)
    settings = {"calibration": tiny.tokens(2, 16), "energy": protocol, "progress": False}
    report = fwanda_pruner.prune(tiny.llama(), method="fwanda", **settings)
    assert len(meters) == 1 and (clock.time > start) == (protocol == "net")
    assert report.energy_details["phases"].keys() == {"calibrate", "budgets", "check", "prune"}
