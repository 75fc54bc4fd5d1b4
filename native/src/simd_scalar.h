// One element at a time: the portable kernels, and the tail of a range in the others.
//
// Every simd_*.h defines the same names. All of it is in an anonymous namespace, and no function of the
// standard library is called: this header is compiled once per instruction set, and a linker that merged the
// copies could hand AVX-512 code to a CPU without it.
#pragma once

#include <stdint.h>
#include <string.h>

namespace {

struct Scalar {
  using F = float;
  using I = uint32_t;
  using M = bool;
  static constexpr int kWidth = 1;
  static constexpr bool kCanBypass = false;

  static F set(float x) { return x; }
  static I iset(uint32_t x) { return x; }
  static I iota(uint32_t first) { return first; }

  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F sqrt(F a) { return __builtin_sqrtf(a); }
  static F fma(F a, F b, F c) { return __builtin_fmaf(a, b, c); }  // a * b + c

  static I iadd(I a, I b) { return a + b; }
  static I isub(I a, I b) { return a - b; }
  static I imul(I a, I b) { return a * b; }
  static I iand(I a, I b) { return a & b; }
  static I ior(I a, I b) { return a | b; }
  static I ixor(I a, I b) { return a ^ b; }
  template <int n> static I shl(I a) { return a << n; }
  template <int n> static I shr(I a) { return a >> n; }

  static I bits(F a) {
    I u;
    memcpy(&u, &a, sizeof u);
    return u;
  }
  static F from_bits(I a) {
    F f;
    memcpy(&f, &a, sizeof f);
    return f;
  }

  static M is_nan(F a) { return a != a; }
  static M greater(F a, F b) { return a > b; }
  static F select(M m, F yes, F no) { return m ? yes : no; }
  static I iselect(M m, I yes, I no) { return m ? yes : no; }

  static void fence() {}

  static F load(const float *p) { return *p; }
  // `nt` asks for a non-temporal store, past the cache, which must be aligned to its size.
  template <bool nt> static void store(float *p, F a) { *p = a; }
  static I load_u16(const uint16_t *p) { return *p; }
  static I load_s16(const int16_t *p) { return static_cast<uint32_t>(static_cast<int32_t>(*p)); }
  template <bool nt> static void store_u16(uint16_t *p, I a) { *p = static_cast<uint16_t>(a); }  // a < 65536
  template <bool nt> static void store_s16(int16_t *p, I a) { *p = static_cast<int16_t>(a); }  // a in int16's range

  static F load_f16(const uint16_t *p) {
    const uint32_t h = *p;
    const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
    if (exponent == 0) return from_bits(bits(static_cast<float>(mantissa) * 0x1p-24f) | sign);
    if (exponent == 31) return from_bits(sign | 0x7f800000u | mantissa << 13 | (mantissa ? 0x400000u : 0u));
    return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
  }
  template <bool nt> static void store_f16(uint16_t *p, F a) {
    const uint32_t u = bits(a) & 0x7fffffffu, sign = (bits(a) >> 16) & 0x8000u;
    uint32_t h;
    if (u > 0x7f800000u) {
      h = 0x7e00u | ((u >> 13) & 0x3ffu);  // a quiet NaN that keeps its upper payload, as hardware does
    } else if (u >= 0x47800000u) {
      h = 0x7c00u;  // 65536 and more
    } else if (u >= 0x38800000u) {
      h = (u + 0xfffu + ((u >> 13) & 1u) - 0x38000000u) >> 13;  // a carry out of 65504 gives infinity
    } else {
      // A subnormal of fp16 is a multiple of 2^-24, the distance between floats in [0.5, 1): adding 0.5 rounds.
      h = bits(from_bits(u) + 0.5f) - 0x3f000000u;
    }
    *p = static_cast<uint16_t>(h | sign);
  }
};

}  // namespace
