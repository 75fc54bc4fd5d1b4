// Eight elements at a time: AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace {

struct Avx2 {
  using F = __m256;
  using I = __m256i;
  using M = __m256;
  static constexpr int kWidth = 8;
  static constexpr bool kCanBypass = true;

  static F set(float x) { return _mm256_set1_ps(x); }
  static I iset(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static I iota(uint32_t first) { return iadd(iset(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }

  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F sqrt(F a) { return _mm256_sqrt_ps(a); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }

  static I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
  static I isub(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I imul(I a, I b) { return _mm256_mullo_epi32(a, b); }
  static I iand(I a, I b) { return _mm256_and_si256(a, b); }
  static I ior(I a, I b) { return _mm256_or_si256(a, b); }
  static I ixor(I a, I b) { return _mm256_xor_si256(a, b); }
  template <int n> static I shl(I a) { return _mm256_slli_epi32(a, n); }
  template <int n> static I shr(I a) { return _mm256_srli_epi32(a, n); }

  static I bits(F a) { return _mm256_castps_si256(a); }
  static F from_bits(I a) { return _mm256_castsi256_ps(a); }

  static M is_nan(F a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
  static M greater(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
  static F select(M m, F yes, F no) { return _mm256_blendv_ps(no, yes, m); }
  static I iselect(M m, I yes, I no) { return bits(select(m, from_bits(yes), from_bits(no))); }

  static void fence() { _mm_sfence(); }

  static F load(const float *p) { return _mm256_loadu_ps(p); }
  template <bool nt> static void store(float *p, F a) { nt ? _mm256_stream_ps(p, a) : _mm256_storeu_ps(p, a); }
  static I load_u16(const uint16_t *p) { return _mm256_cvtepu16_epi32(load_128(p)); }
  static I load_s16(const int16_t *p) { return _mm256_cvtepi16_epi32(load_128(p)); }
  template <bool nt> static void store_u16(uint16_t *p, I a) { store_packed<nt>(p, _mm256_packus_epi32(a, a)); }
  template <bool nt> static void store_s16(int16_t *p, I a) { store_packed<nt>(p, _mm256_packs_epi32(a, a)); }
  static F load_f16(const uint16_t *p) { return _mm256_cvtph_ps(load_128(p)); }
  template <bool nt> static void store_f16(uint16_t *p, F a) {
    store_128<nt>(p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

 private:
  static __m128i load_128(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }
  template <bool nt> static void store_128(void *p, __m128i a) {
    auto *at = static_cast<__m128i *>(p);
    nt ? _mm_stream_si128(at, a) : _mm_storeu_si128(at, a);
  }
  // Packing works in each half of the register, so the quarters have to be put in order.
  template <bool nt> static void store_packed(void *p, __m256i packed) {
    store_128<nt>(p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
  }
};

using Simd = Avx2;

}  // namespace
