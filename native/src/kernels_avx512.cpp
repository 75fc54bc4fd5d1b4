#include "simd_avx512.h"
#include "rules.h"

const forebay::KernelTable forebay::kAvx512Kernels = FOREBAY_KERNEL_TABLE("avx512");
