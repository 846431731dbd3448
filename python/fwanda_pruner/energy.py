"""Energy of a stretch of work, from the counters of the GPUs."""

import contextlib
from typing import Any

import torch


class EnergyMeter:
    """Context manager that reads the total-energy counters (NVML) of all visible CUDA GPUs, idle power included.

    Never raises: where energy cannot be measured, the reason is the result. An estimate is never given.

    Args:
        device: where the work runs; waited for before each reading. On a device other than CUDA nothing is measured.

    Attributes:
        result: joules as float, or "not measured: <why>"; final once the block is left.
    """

    def __init__(self, device: str | torch.device):
        self.result: float | str = "not measured: the measurement has not ended"
        self._device = torch.device(device)
        self._nvml: Any = None
        self._gpus: list[Any] = []
        self._start = 0

    def __enter__(self) -> "EnergyMeter":
        if self._device.type != "cuda":
            self.result = f"not measured: the device is {self._device.type}"
            return self
        try:
            import pynvml
        except ImportError:
            self.result = "not measured: no NVML (pip install nvidia-ml-py)"
            return self
        try:
            pynvml.nvmlInit()
            self._nvml = pynvml
            uuids = [torch.cuda.get_device_properties(i).uuid for i in range(torch.cuda.device_count())]
            self._gpus = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
            self._start = self._millijoules()
        except Exception as error:  # NVMLError, or what a broken driver raises: work must go on
            self._give_up(error)
        return self

    def __exit__(self, *_: object) -> None:
        if self._nvml is None:
            return
        try:
            self.result = (self._millijoules() - self._start) / 1000
        except Exception as error:  # as above; also must not hide an error of the work itself
            self._give_up(error)
        self._shutdown()

    def _millijoules(self) -> int:
        torch.cuda.synchronize(self._device)
        return sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) for gpu in self._gpus)

    def _give_up(self, error: Exception) -> None:
        self.result = f"not measured: {' '.join(str(error).split()) or type(error).__name__}"
        self._shutdown()

    def _shutdown(self) -> None:
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with contextlib.suppress(Exception):
                nvml.nvmlShutdown()
