// What the instruction-set specific files offer to the rest of the library.
#pragma once

#include <stdint.h>

#include "forebay_native.h"

namespace forebay {

constexpr int kNumRules = 3;     // Adam and AdamW are one
constexpr int kNumGrads = 3;     // forebay_dtype
constexpr int kNumWeights = 7;   // Weight
constexpr int kNumStates = 2;    // fp32, bf16

enum Rule { kAdam = 0, kSgd = 1, kLion = 2 };

// How a weight is kept: where the fp32 master is read from and what is written.
enum Weight {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kRemainder16 = 3,
  kMasterFloat32 = 4,
  kMasterBFloat16 = 5,
  kMasterFloat16 = 6,
};

// The scalars of one segment in one run, rounded to fp32.
struct Scalars {
  float grad_scale;  // negative for maximize
  float decay;       // the weight is multiplied by it
  float l2;          // weight decay added to the gradient
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float lerp_weight;
  float bias2_inverse_sqrt, eps;
  float minus_step_size;
  float momentum, one_minus_dampening;
  uint32_t has_l2 : 1, has_momentum : 1, is_first : 1, is_nesterov : 1, lerp_from_grad : 1;
};

// Elements [begin, end) of a segment, all with the same upper 32 bits of their index in the tensor.
struct Range {
  const forebay_segment *segment;
  const Scalars *scalars;
  int64_t begin, end;
  uint32_t key0, key1;  // of stochastic rounding
};

using Kernel = void (*)(const Range &);

struct KernelTable {
  const char *name;
  Kernel kernels[kNumRules][kNumGrads][kNumWeights][kNumStates];
};

extern const KernelTable kScalarKernels;
#if defined(FOREBAY_HAVE_X86)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif
#if defined(FOREBAY_HAVE_NEON)
extern const KernelTable kNeonKernels;
#endif

// The table in use, or nullptr when FOREBAY_NATIVE_ISA asks for one that is not available.
const KernelTable *kernels();

}  // namespace forebay
