// Codes that a selection ORs into `bad`, for C++ and CUDA. fwanda_kernels/_checks.py has the same ones for Python.
#pragma once

namespace fwanda {

constexpr int kBadWeight = 1;  // a weight is NaN or inf
constexpr int kBadScale = 2;   // a scale is NaN, inf or negative
constexpr int kBadKeep = 4;    // a count is not in [0, C]

// Codes of the library for CPUs, which throws nothing: an exception that left it would end the process on some machines.
constexpr int kRefused = 8;    // a shape, dtype or layout that Python should have refused
constexpr int kAltered = 16;   // the bytes of a packed weight do not fit its offsets

}  // namespace fwanda
