"""The rates that the cost model divides by, and where each was measured. `prune-...`: files of benchmarks/results."""

from dataclasses import dataclass

# The host, from results of the 7B shape on an H200
HOST_LINEAR = 0.24e-3  # s for a linear layer, its hooks and what stands around it, forward and uncompiled; a backward
# pass takes twice that. Calibration of prune-llama-2-7b-fsparsegpt-...: 161 ms a window = 3 x 224 layers
START = 4.0  # s, the first use of kernels in a process: cold less warm of prune-llama-2-7b-2-blocks-sparsegpt-...
COMPILE = 5.0  # s, a compiled graph, forward or backward: compile_seconds of prune-llama-2-7b-wanda-...

# Links, bytes/s a GPU: about 80 % of what vendors name
PCIE = 50e9  # 54e9 from pinned RAM, measured on one H200: benchmarks/LOG.md, "Several GPUs"
NVLINK = 400e9
NETWORK = 50e9  # between machines
DISK = 6e9  # one NVMe drive that serves one GPU
NODE = 8  # GPUs of a machine, which NVLink joins


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        memory: bytes.
        matmul: bf16 products of 8,192 x 8,192 for two seconds (`roof` of the results).
        attention: forward and backward pass.
        fp32: the Cholesky factor and the updates of OBS, without TF32.
        hbm: bytes/s of a copy, read and written.
    """

    name: str
    memory: float
    matmul: float
    attention: float
    fp32: float
    hbm: float


# matmul: roof of prune-*.json; hbm: copy_gb_per_s, fp32: C^3 / time of obs_factor at 11008, both of ops-*.json;
# attention: benchmarks/LOG.md, v10
CARDS = {
    "NVIDIA H200": Card("H200", 150e9, 672e12, 310e12, 33.9e12, 4244e9),
    "NVIDIA H100 80GB HBM3": Card("H100", 85e9, 700e12, 310e12, 33.0e12, 3001e9),
}
