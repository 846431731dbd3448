// Codes that a selection ORs into `bad`, for C++ and CUDA. fwanda_kernels/_checks.py has the same ones for Python.
#pragma once

namespace fwanda {

constexpr int kBadWeight = 1;  // a weight is NaN or inf
constexpr int kBadScale = 2;   // a scale is NaN, inf or negative
constexpr int kBadKeep = 4;    // a count is not in [0, C]

}  // namespace fwanda
