#include "simd_scalar.h"

namespace {
using Simd = Scalar;
}

#include "rules.h"

const forebay::KernelTable forebay::kScalarKernels = FOREBAY_KERNEL_TABLE("scalar");
