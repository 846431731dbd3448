#!/usr/bin/env bash
# Checks the CUDA kernels on a machine with a GPU, in about three minutes: what serves, the first call, the tests, the
# sanitizer if it is installed, and the speed of a few ops with their cost on the host.
#
#     bash benchmarks/check_cuda.sh [PYTHON]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-python3}
failed=0
export PYTHONPATH=$PWD:$PWD/python OMP_NUM_THREADS=1

step() {
    echo "== $1"
    shift
    "$@" || { failed=1; echo "FAILED: $*"; }
}
sanitize() {
    compute-sanitizer --tool "$1" --error-exitcode 1 "$python" benchmarks/sanitize.py --backends native | tail -n 25
}

step "what serves" "$python" -m fwanda_kernels
step "first call" "$python" benchmarks/first_call.py
# at most four processes: each of the largest tests takes 10 GB of the GPU
workers=$("$python" -c 'import xdist' 2>/dev/null && echo "-n 4 --dist worksteal")
step "tests" "$python" -m pytest -q $workers -W ignore tests/test_cuda.py tests/test_cuda_obs.py \
    tests/test_cuda_calls.py tests/test_cuda_modules.py tests/test_cuda_packed.py \
    -k "not triton and not compiles_every_module"
if command -v compute-sanitizer >/dev/null; then
    step "memcheck" sanitize memcheck
    step "racecheck" sanitize racecheck
else
    echo "== no compute-sanitizer on the path"
fi
step "host, native" "$python" benchmarks/host_cost.py
step "host, Triton" "$python" benchmarks/host_cost.py --backend triton
step "speed" "$python" -m pytest -q benchmarks/bench_ops.py --benchmark \
    -k "(row_topk_prune_ or nm_prune_ or sq_sums or compress_24 or select_threshold) and not cusparselt and not 28672"
exit $failed
