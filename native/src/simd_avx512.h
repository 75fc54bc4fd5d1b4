// Sixteen elements at a time: AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace {

struct Avx512 {
  using F = __m512;
  using I = __m512i;
  using M = __mmask16;
  static constexpr int kWidth = 16;
  static constexpr bool kCanBypass = true;

  static F set(float x) { return _mm512_set1_ps(x); }
  static I iset(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static I iota(uint32_t first) {
    return iadd(iset(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }

  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F sqrt(F a) { return _mm512_sqrt_ps(a); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

  static I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
  static I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static I iand(I a, I b) { return _mm512_and_si512(a, b); }
  static I ior(I a, I b) { return _mm512_or_si512(a, b); }
  static I ixor(I a, I b) { return _mm512_xor_si512(a, b); }
  template <int n> static I shl(I a) { return _mm512_slli_epi32(a, n); }
  template <int n> static I shr(I a) { return _mm512_srli_epi32(a, n); }

  static I bits(F a) { return _mm512_castps_si512(a); }
  static F from_bits(I a) { return _mm512_castsi512_ps(a); }

  static M is_nan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
  static M greater(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static F select(M m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
  static I iselect(M m, I yes, I no) { return _mm512_mask_blend_epi32(m, no, yes); }

  static void fence() { _mm_sfence(); }

  static F load(const float *p) { return _mm512_loadu_ps(p); }
  template <bool nt> static void store(float *p, F a) { nt ? _mm512_stream_ps(p, a) : _mm512_storeu_ps(p, a); }
  static I load_u16(const uint16_t *p) { return _mm512_cvtepu16_epi32(load_256(p)); }
  static I load_s16(const int16_t *p) { return _mm512_cvtepi16_epi32(load_256(p)); }
  template <bool nt> static void store_u16(uint16_t *p, I a) { store_256<nt>(p, _mm512_cvtepi32_epi16(a)); }
  template <bool nt> static void store_s16(int16_t *p, I a) { store_256<nt>(p, _mm512_cvtepi32_epi16(a)); }
  static F load_f16(const uint16_t *p) { return _mm512_cvtph_ps(load_256(p)); }
  template <bool nt> static void store_f16(uint16_t *p, F a) {
    store_256<nt>(p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

 private:
  static __m256i load_256(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
  template <bool nt> static void store_256(void *p, __m256i a) {
    auto *at = static_cast<__m256i *>(p);
    nt ? _mm256_stream_si256(at, a) : _mm256_storeu_si256(at, a);
  }
};

using Simd = Avx512;

}  // namespace
