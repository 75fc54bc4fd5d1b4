// Which instruction set the kernels use: looked up once, or set by tests and benchmarks.
#include <stdlib.h>
#include <string.h>

#include <atomic>

#if defined(FOREBAY_HAVE_X86)
#include <cpuid.h>
#endif

#include "kernels.h"

namespace forebay {
namespace {

#if defined(FOREBAY_HAVE_X86)
// Not __builtin_cpu_supports: some compilers' runtime libraries answer no to everything.
constexpr unsigned kYmmState = 0x06, kZmmState = 0xe6;  // registers that the operating system saves

bool has(unsigned leaf1_ecx, unsigned leaf7_ebx, unsigned state) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  leaf1_ecx |= bit_OSXSAVE;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & leaf1_ecx) != leaf1_ecx) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & state) != state) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & leaf7_ebx) == leaf7_ebx;
}

bool has_avx2() { return has(bit_FMA | bit_F16C | bit_AVX, bit_AVX2, kYmmState); }

bool has_avx512() {
  constexpr unsigned features = bit_AVX2 | bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  return has(bit_FMA | bit_F16C | bit_AVX, features, kZmmState);
}
#endif

// The table called `name`, or the best one for nullptr; nullptr when this CPU or build does not have it.
const KernelTable *find(const char *name) {
  const auto asked = [name](const char *candidate) { return !name || strcmp(name, candidate) == 0; };
#if defined(FOREBAY_HAVE_X86)
  if (asked("avx512") && has_avx512()) return &kAvx512Kernels;
  if (asked("avx2") && has_avx2()) return &kAvx2Kernels;
#endif
#if defined(FOREBAY_HAVE_NEON)
  if (asked("neon")) return &kNeonKernels;
#endif
  return asked("scalar") ? &kScalarKernels : nullptr;
}

std::atomic<const KernelTable *> chosen{nullptr};

}  // namespace

const KernelTable *kernels() {
  const KernelTable *table = chosen.load(std::memory_order_acquire);
  if (!table) {
    const char *name = getenv("FOREBAY_NATIVE_ISA");
    table = find(name && *name ? name : nullptr);
    chosen.store(table, std::memory_order_release);
  }
  return table;
}

}  // namespace forebay

extern "C" {

const char *forebay_instruction_set(void) {
  const forebay::KernelTable *table = forebay::kernels();
  return table ? table->name : nullptr;
}

int32_t forebay_set_instruction_set(const char *name) {
  const forebay::KernelTable *table = name ? forebay::find(name) : nullptr;
  if (!table) return -1;
  forebay::chosen.store(table, std::memory_order_release);
  return 0;
}

}  // extern "C"
