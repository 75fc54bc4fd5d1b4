// Four elements at a time: the NEON that every 64-bit ARM CPU has.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

namespace {

struct Neon {
  using F = float32x4_t;
  using I = uint32x4_t;
  using M = uint32x4_t;
  static constexpr int kWidth = 4;
  static constexpr bool kCanBypass = false;

  static F set(float x) { return vdupq_n_f32(x); }
  static I iset(uint32_t x) { return vdupq_n_u32(x); }
  static I iota(uint32_t first) {
    const uint32_t offsets[4] = {0, 1, 2, 3};
    return iadd(iset(first), vld1q_u32(offsets));
  }

  static F add(F a, F b) { return vaddq_f32(a, b); }
  static F sub(F a, F b) { return vsubq_f32(a, b); }
  static F mul(F a, F b) { return vmulq_f32(a, b); }
  static F div(F a, F b) { return vdivq_f32(a, b); }
  static F sqrt(F a) { return vsqrtq_f32(a); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }

  static I iadd(I a, I b) { return vaddq_u32(a, b); }
  static I isub(I a, I b) { return vsubq_u32(a, b); }
  static I imul(I a, I b) { return vmulq_u32(a, b); }
  static I iand(I a, I b) { return vandq_u32(a, b); }
  static I ior(I a, I b) { return vorrq_u32(a, b); }
  static I ixor(I a, I b) { return veorq_u32(a, b); }
  template <int n> static I shl(I a) { return vshlq_n_u32(a, n); }
  template <int n> static I shr(I a) { return vshrq_n_u32(a, n); }

  static I bits(F a) { return vreinterpretq_u32_f32(a); }
  static F from_bits(I a) { return vreinterpretq_f32_u32(a); }

  static M is_nan(F a) { return vmvnq_u32(vceqq_f32(a, a)); }
  static M greater(F a, F b) { return vcgtq_f32(a, b); }
  static F select(M m, F yes, F no) { return vbslq_f32(m, yes, no); }
  static I iselect(M m, I yes, I no) { return vbslq_u32(m, yes, no); }

  static void fence() {}

  static F load(const float *p) { return vld1q_f32(p); }
  template <bool nt> static void store(float *p, F a) { vst1q_f32(p, a); }
  static I load_u16(const uint16_t *p) { return vmovl_u16(vld1_u16(p)); }
  static I load_s16(const int16_t *p) { return vreinterpretq_u32_s32(vmovl_s16(vld1_s16(p))); }
  template <bool nt> static void store_u16(uint16_t *p, I a) { vst1_u16(p, vmovn_u32(a)); }
  template <bool nt> static void store_s16(int16_t *p, I a) { vst1_s16(p, vreinterpret_s16_u16(vmovn_u32(a))); }
  static F load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
  template <bool nt> static void store_f16(uint16_t *p, F a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
};

using Simd = Neon;

}  // namespace
