"""The part of the CUDA driver API that loads and launches kernels, through ctypes.

torch owns the GPU: this module uses torch's contexts and streams, and allocates no device memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from functools import cache
from struct import Struct
from threading import Lock
from typing import NamedTuple

OLDEST_DRIVER = 12010  # CUDA 12.1, driver 530: kernel arguments of more than 4 KB
_MAX_SHARED = 48 * 1024  # bytes of dynamic shared memory that a kernel may have without asking
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_MULTIPROCESSORS, _MAJOR, _MINOR, _MOST_SHARED = 16, 75, 76, 97  # CUdevice_attribute
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_WRONG_IMAGE = (200, 209, 500)  # CUDA_ERROR_INVALID_IMAGE, NO_BINARY_FOR_GPU, NOT_FOUND
_ARGUMENTS = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [c_void_p],
    "cuDeviceGetCount": [c_void_p],
    "cuDeviceGetAttribute": [c_void_p, c_int, c_int],
    "cuDevicePrimaryCtxRetain": [c_void_p, c_int],
    "cuCtxGetCurrent": [c_void_p],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [c_void_p],
    "cuThreadExchangeStreamCaptureMode": [c_void_p],
    "cuModuleLoadData": [c_void_p, c_char_p],
    "cuModuleGetFunction": [c_void_p, c_void_p, c_char_p],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuLaunchKernelEx": [c_char_p, c_void_p, c_void_p, c_void_p],
    "cuMemsetD8Async": [c_void_p, c_ubyte, c_size_t, c_void_p],
    "cuGetErrorString": [c_int, c_void_p],
}

_ATTRIBUTE = Struct("i4x3I52x")  # CUlaunchAttribute: id, value
_CONFIG = Struct("7IPPI0P")  # CUlaunchConfig: grid, block, shared memory, stream, attributes, their number


class DriverError(RuntimeError):
    """A call of the driver failed, perhaps because of an earlier kernel of this process."""

    def __init__(self, function: str, code: int):
        text = c_char_p()
        _driver()["cuGetErrorString"](code, byref(text))
        super().__init__(f"{function}: {(text.value or b'unknown error').decode()} ({code})")
        self.code = code


class Zero(NamedTuple):
    """Sets bytes of device memory to 0."""

    address: int
    size: int


class Launch(NamedTuple):
    """One launch of a kernel.

    Attributes:
        module: family and variant, as in compile.MODULES.
        kernel: its name in the .cu file.
        blocks: size of the grid in x.
        threads: per block.
        parameters: the bytes of each parameter, in order.
        shared: bytes of dynamic shared memory.
        blocks_y: size of the grid in y.
        early: programmatic dependent launch: the kernel may start before the previous one ends, and waits for it.
        cluster: blocks of a cluster, which are neighbours in x.
    """

    module: tuple[str, str]
    kernel: str
    blocks: int
    threads: int
    parameters: Sequence[bytes]
    shared: int = 0
    blocks_y: int = 1
    early: bool = False
    cluster: int = 1


class _Function:
    """A kernel in the context of one device."""

    def __init__(self, handle: int):
        self.handle, self.max_shared = handle, _MAX_SHARED
        self._lock = Lock()

    def allow_shared(self, size: int) -> None:
        with self._lock:
            if size > self.max_shared:
                call("cuFuncSetAttribute", self.handle, _DYNAMIC_SHARED, size)
                self.max_shared = size


class Device:
    """One GPU, and the kernels that are loaded there.

    Args:
        index: of the device, in torch and in the driver.
        find_code: gives the cubin of a module for a compute capability.

    Attributes:
        capability: (major, minor).
        multiprocessors: how many the card has.
        shared_bytes: of dynamic shared memory that a block may have.
    """

    def __init__(self, index: int, find_code: Callable[[tuple[str, str], tuple[int, int]], bytes]):
        self.index, self._find_code = index, find_code
        self.capability = capability(index)
        self.multiprocessors = _attribute(_MULTIPROCESSORS, index)
        self.shared_bytes = _attribute(_MOST_SHARED, index)
        context = c_void_p()
        call("cuDevicePrimaryCtxRetain", byref(context), index)
        self._context = context.value
        self._modules: dict[tuple[str, str], int] = {}
        self._functions: dict[tuple[tuple[str, str], str], _Function] = {}
        self._lock = Lock()
        self._get_current, self._launch_kernel = (_driver()[f] for f in ("cuCtxGetCurrent", "cuLaunchKernelEx"))

    def run(self, steps: Sequence[Launch | Zero], stream: int) -> None:
        """Queue the steps on a stream, in order. All kernels are loaded before the first is launched.

        Raises:
            ImportError: a kernel cannot be compiled or loaded here; nothing was queued.
            DriverError: a launch failed.
        """
        current = c_void_p()
        self._get_current(byref(current))
        if current.value == self._context:
            self._run(steps, stream)
            return
        # this thread has not used the GPU yet, or works on another one
        call("cuCtxPushCurrent_v2", self._context)
        try:
            self._run(steps, stream)
        finally:
            call("cuCtxPopCurrent_v2", byref(current))

    def _run(self, steps: Sequence[Launch | Zero], stream: int) -> None:
        known = self._functions
        for step in steps:
            if type(step) is Launch and (step.module, step.kernel) not in known:
                self._load(step.module, step.kernel)
        for step in steps:
            if type(step) is Launch:
                self._launch(known[step.module, step.kernel], step, stream)
            else:
                call("cuMemsetD8Async", step.address, 0, step.size, stream)

    def _launch(self, function: _Function, step: Launch, stream: int) -> None:
        _, _, blocks, threads, parameters, shared, blocks_y, early, cluster = step
        if shared > function.max_shared:
            function.allow_shared(shared)
        attributes = _attributes(early, cluster)
        address = ctypes.addressof(attributes) if attributes else 0
        count = len(attributes) // _ATTRIBUTE.size
        config = _CONFIG.pack(blocks, blocks_y, 1, threads, 1, 1, shared, stream, address, count)
        # the array points at the bytes objects and keeps them alive; the driver copies them during the call
        pointers = (c_char_p * len(parameters))(*parameters)
        if code := self._launch_kernel(config, function.handle, pointers, None):
            raise DriverError("cuLaunchKernelEx", code)

    def _load(self, module: tuple[str, str], kernel: str) -> None:
        """Load a kernel. Relaxed capture mode allows this while this or another thread captures a stream."""
        with self._lock:
            mode = c_int(_RELAXED)
            call("cuThreadExchangeStreamCaptureMode", byref(mode))
            try:
                if module not in self._modules:
                    loaded = c_void_p()
                    call("cuModuleLoadData", byref(loaded), self._find_code(module, self.capability))
                    self._modules[module] = loaded.value
                function = c_void_p()
                call("cuModuleGetFunction", byref(function), self._modules[module], kernel.encode())
                self._functions[module, kernel] = _Function(function.value)
            except DriverError as error:
                if error.code in _WRONG_IMAGE:
                    raise ImportError(f"the driver does not accept the kernels {'-'.join(module)}: {error}") from error
                raise
            finally:
                call("cuThreadExchangeStreamCaptureMode", byref(mode))


@cache
def _attributes(early: bool, cluster: int) -> ctypes.Array | tuple[()]:
    """The launch attributes as a C array; the cache keeps its address valid."""
    packed = _ATTRIBUTE.pack(_PROGRAMMATIC, 1, 0, 0) if early else b""
    if cluster > 1:
        packed += _ATTRIBUTE.pack(_CLUSTER, cluster, 1, 1)
    return ctypes.create_string_buffer(packed, len(packed)) if packed else ()


def call(function: str, *arguments) -> None:
    """Call a function of the driver.

    Raises:
        ImportError: there is no driver.
        DriverError: it returned an error.
    """
    code = _driver()[function](*arguments)
    if code:
        raise DriverError(function, code)


@cache
def _driver() -> dict[str, Callable[..., int]]:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ImportError(f"no CUDA driver: {error}") from error
    functions = {}
    for name, types in _ARGUMENTS.items():
        if function := getattr(library, name, None):  # an old driver lacks some; check_driver() reports it
            function.argtypes, function.restype = types, c_int
            functions[name] = function
    if code := functions["cuInit"](0):
        raise ImportError(f"the CUDA driver cannot be used (error {code})")
    return functions


def check_driver() -> None:
    """Raise ImportError unless the driver is new enough."""
    version = c_int()
    call("cuDriverGetVersion", byref(version))
    if version.value < OLDEST_DRIVER:
        has = f"{version.value // 1000}.{version.value % 1000 // 10}"
        raise ImportError(f"the driver supports CUDA {has}, the kernels need 12.1; install driver 530 or newer")


def capability(index: int) -> tuple[int, int]:
    """Compute capability of a device."""
    return _attribute(_MAJOR, index), _attribute(_MINOR, index)


def count_devices() -> int:
    """Number of GPUs that the driver sees."""
    count = c_int()
    call("cuDeviceGetCount", byref(count))
    return count.value


def _attribute(attribute: int, index: int) -> int:
    value = c_int()
    call("cuDeviceGetAttribute", byref(value), attribute, index)
    return value.value
