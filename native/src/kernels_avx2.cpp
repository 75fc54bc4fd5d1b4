#include "simd_avx2.h"
#include "rules.h"

const forebay::KernelTable forebay::kAvx2Kernels = FOREBAY_KERNEL_TABLE("avx2");
