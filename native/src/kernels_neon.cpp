#include "simd_neon.h"
#include "rules.h"

const forebay::KernelTable forebay::kNeonKernels = FOREBAY_KERNEL_TABLE("neon");
